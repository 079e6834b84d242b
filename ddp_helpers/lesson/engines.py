"""MPI ranks for a notebook: start_engines(4), and from then on every %%px cell runs on 4 ranks.

    from ddp_helpers.lesson.engines import start_engines
    engines = start_engines(4)

    %%px
    from ddp_helpers.worker.environment import detect
    print("hello from", detect().rank)

    engines.pull("number")       # [its value on rank 0, on rank 1, ...]
    engines.push(number=3)       # give it to every rank
    engines.restart()            # new ranks, when a cell has left some of them waiting

    start_engines(hosts=parse_hosts("node-a:2,node-b:2"))     # from ddp_helpers.launch.hosts

%%px --timeout 20 ends a cell after 20 seconds, and %%px --ranks 0,2 runs it on two ranks only.
The ranks are engines of ipyparallel, which mpirun starts; they end with the notebook's kernel.
Lesson: notebooks/01_processes_and_ranks.ipynb
"""

from __future__ import annotations

import atexit
import linecache
import sys
from collections.abc import Sequence
from typing import Any

from ddp_helpers.launch.hosts import Host, local
from ddp_helpers.lesson import in_rank
from ddp_helpers.lesson.cell import RanksFailed, finish_cell, start_cell, still_busy
from ddp_helpers.lesson.places import Rank
from ddp_helpers.lesson.px import CELL_S, register_px
from ddp_helpers.lesson.report import GO_ON, name_ranks
from ddp_helpers.lesson.session import EnginesNotStarted, Session, start, stop, why_ended

_ANSWER_S = 60.0  # for a value, which no rank has to compute


def start_engines(n: int | None = None, hosts: Sequence[Host] | None = None) -> Engines:
    """Start n (4) MPI ranks on this machine and let every %%px cell of this notebook run on them.

    hosts, in place of n: start one rank for each of their slots, over ssh. Prints nothing and
    returns when all are ready. Called again, it first stops the ranks of the call before. Raises
    EnginesNotStarted, with the reason, after at most two minutes.
    Lesson: notebooks/01_processes_and_ranks.ipynb, notebooks/06_two_nodes.ipynb
    """
    if hosts is None:
        hosts = local(4 if n is None else n)
    elif n is not None:
        raise EnginesNotStarted(f"n={n} and hosts: the slots of the hosts say how many.")
    if sum(host.slots for host in hosts) < 1:
        raise EnginesNotStarted("0 ranks, expected 1 or more.")
    shell = _ipython()
    earlier = shell and getattr(shell.find_cell_magic("px"), "engines", None)
    if earlier:
        earlier.stop()
    engines = Engines(tuple(hosts))
    if shell:
        register_px(shell, engines)
    return engines


class Engines:
    """MPI ranks and the cells that run on them; start_engines makes one."""

    def __init__(self, hosts: tuple[Host, ...]):
        self._hosts = hosts
        self._n = sum(host.slots for host in hosts)
        self._cells = 0
        self._pending: dict[Rank, Any] = {}
        self._session: Session | None = start(hosts)
        atexit.register(self.stop)

    def __len__(self) -> int:
        return self._n

    def __repr__(self) -> str:
        if self._session is None:
            return "<no ranks; engines.restart() starts them>"
        hosts = ", ".join(host.name for host in self._hosts)
        where = "this machine" if self._hosts == local(self._n) else hosts
        return f"<{self._n} MPI ranks on {where}, {self._session.mpi.flavour}>"

    def run(self, source: str, ranks: list[int] | None = None, timeout_s: float = CELL_S) -> None:
        """Run source on ranks (None: on all) and show what they print: what %%px does.

        Raises RanksFailed when a rank raises, or has not finished after timeout_s seconds.
        """
        chosen = self._free_ranks(ranks)
        self._cells += 1
        name = f"<px {self._cells}>"
        # For the lines that reports show; no modification time, so that it is never dropped.
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
        self._pending = start_cell(chosen, source, name)
        finish_cell(self._pending, name, timeout_s, self._why_gone)

    def pull(self, name: str) -> list[Any]:
        """Return the value of the ranks' variable name: rank 0's first."""
        ranks = self._free_ranks()
        pending = [one.view.apply_async(in_rank.read_variable, name) for one in ranks]
        found = [one.get(timeout=_ANSWER_S) for one in pending]
        missing = [rank for rank, one in enumerate(found) if not one]
        if missing:
            raise NameError(f"no variable {name!r} on rank {', '.join(map(str, missing))}")
        return [one["value"] for one in found]

    def push(self, **values: Any) -> None:
        """Give every rank variables of these names and values."""
        ranks = self._free_ranks()
        for one in [one.view.apply_async(in_rank.set_variables, values) for one in ranks]:
            one.get(timeout=_ANSWER_S)

    def restart(self) -> None:
        """Stop the ranks, also those that wait for ever, and start as many new ones."""
        self.stop()
        self._session = start(self._hosts)
        atexit.register(self.stop)
        print(f"{self._n} new ranks, with empty memory: run the cells with imports again.")

    def stop(self) -> None:
        """Stop the ranks and everything that belongs to them; nothing is left on the machine."""
        session, self._session, self._pending = self._session, None, {}
        if session:
            atexit.unregister(self.stop)
            stop(session)

    def _free_ranks(self, numbers: list[int] | None = None) -> list[Rank]:
        if self._session is None:
            raise RanksFailed(f"the ranks are stopped\n{GO_ON}")
        if gone := self._why_gone():
            raise RanksFailed(f"{gone}\n{GO_ON}")
        if busy := still_busy(self._pending):
            who = name_ranks([one.rank for one in busy])
            raise RanksFailed(
                f"{who} {'is' if len(busy) == 1 else 'are'} still in an earlier cell\n{GO_ON}"
            )
        numbers = list(range(self._n)) if numbers is None else numbers
        return [self._session.ranks[number] for number in numbers]

    def _why_gone(self) -> str | None:
        return self._session and why_ended(self._session)


def _ipython() -> Any:
    """Return the running IPython, or None in a plain Python script."""
    module = sys.modules.get("IPython")
    return module.get_ipython() if module else None
