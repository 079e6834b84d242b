"""Say where ranks wait, and for whom, long before a timeout does; name the rank that failed first.

Copy with network.py.

    with process_group(env) as device, watchdog(env.rank, env.world_size):
        ...

A thread in each rank looks at the main thread. A rank that has waited in one collective for
after_s seconds prints its stack; the first of them also prints what the other ranks do: which
wait too, which are elsewhere in the script, which do not answer, which have failed or left.
Lesson: notebooks/08_when_it_hangs.ipynb
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as dist

try:
    from .network import in_time
except ImportError:  # copied next to a script
    from network import in_time

_TORCH = str(Path(torch.__file__).parent)
# What a rank raises when it is another rank that has failed, left or hangs.
_CONSEQUENCE = re.compile(r"connection|peer|timed? ?out|socket|broken pipe", re.IGNORECASE)

_ANSWER_S = 5.0  # the store answers in milliseconds, unless its process is stopped

T = TypeVar("T")

# How the states of ranks begin that have ended.
_FAILED, _LOST, _LEFT = "failed first: ", "has lost another rank: ", "has left the process group"


class PeerFailed(RuntimeError):
    """This rank lost a rank that failed first; the text names it, its host and its error."""


@contextlib.contextmanager
def watchdog(rank: int, world_size: int, after_s: float = 60.0) -> Iterator[None]:
    """Watch this rank for the with block's length; every rank of the process group must enter it.

    Prints to stderr. Raises PeerFailed in place of an error that follows from another rank's.
    """
    watcher = _Watcher(rank, world_size, after_s)
    watcher.start()
    try:
        yield
    except BaseException as error:
        cause = watcher.cause() if _follows(error) else ""
        if cause:
            watcher.end(f"{_LOST}{cause}")
            raise PeerFailed(cause) from error
        watcher.end(
            f"{'has given up: ' if _follows(error) else _FAILED}{_name(error)}{_place_of(error)}"
        )
        raise
    else:
        watcher.end(_LEFT)


class _Watcher(threading.Thread):
    def __init__(self, rank: int, world_size: int, after_s: float):
        super().__init__(daemon=True)
        self._rank, self._others = rank, [r for r in range(world_size) if r != rank]
        self._after_s, self._interval_s = after_s, min(5.0, after_s / 4)
        self._main = threading.get_ident()
        self._store = dist.PrefixStore("watchdog", dist.distributed_c10d._get_default_store())
        self._ending = threading.Event()
        self._store_is_free = threading.Lock()
        self._store_is_silent = False
        self._who_serves = "rank 0"
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            self._who_serves = "torchrun's agent beside rank 0"
        self._beats = 0
        self._who = f"rank {rank} on {socket.gethostname()} (pid {os.getpid()})"
        with contextlib.suppress(Exception):
            self._ask(lambda: self._post("has just come here", 0.0))

    def run(self) -> None:
        stack, since, reported = [], time.monotonic(), False
        while not self._ending.wait(self._interval_s):
            before, stack = stack, _stack(sys._current_frames().get(self._main))
            if stack != before:
                since, reported = time.monotonic(), False
            waiting_s = time.monotonic() - since
            with contextlib.suppress(Exception):  # the store has gone: the block ends soon
                self._ask(lambda now=stack, s=waiting_s: self._post(_describe(now), s))
            if waiting_s > self._after_s and not reported and _collective(stack):
                reported = True
                with contextlib.suppress(Exception):
                    self._report(stack, waiting_s)

    def _ask(self, question: Callable[[], T]) -> T:
        """Return what question, which uses the store, returns; TimeoutError when it is silent.

        A question to a store whose process is stopped never comes back, and the next waits for it.
        """
        if not self._store_is_free.acquire(timeout=0 if self._store_is_silent else _ANSWER_S):
            self._store_is_silent = True
            raise TimeoutError

        def asked() -> T:
            try:
                return question()
            finally:
                self._store_is_free.release()

        try:
            answer = in_time(asked, _ANSWER_S)
        except TimeoutError:
            self._store_is_silent = True
            raise
        self._store_is_silent = False
        return answer

    def end(self, state: str) -> None:
        """Stop watching, and let the others know why."""
        self._ending.set()
        with contextlib.suppress(Exception):
            self._ask(lambda: self._post(state, 0.0, ended=True))
        if self._rank == 0:  # no daemon: the process, which holds the store, waits for it
            threading.Thread(target=self._linger).start()

    def _linger(self, timeout_s: float = 3.0) -> None:
        """Wait until the other ranks have ended: those that lose this one ask the store why."""
        deadline = time.monotonic() + timeout_s
        with contextlib.suppress(Exception):
            while time.monotonic() < deadline:
                states = [self._read(rank) for rank in self._others]
                if all(state and state["ended"] for state in states):
                    return
                time.sleep(0.05)

    def cause(self) -> str:
        """Return the rank that ended before this one lost it, and how; "" when none has said so."""
        try:
            ended = [one for one in self._states().values() if one and one["ended"]]
            for begin in (_FAILED, _LOST, _LEFT):
                for one in ended:
                    if one["state"].startswith(begin):
                        told = f"{one['who']} {one['state']}"
                        return told.partition(_LOST)[2] or told  # who lost one names it already
        except TimeoutError:
            return self._silence()
        except Exception:  # the store has gone with its process
            return ""
        return ""

    def _post(self, state: str, waiting_s: float, ended: bool = False) -> None:
        self._beats += 1
        fields = {"who": self._who, "state": state, "waiting_s": waiting_s, "ended": ended}
        self._store.set(f"{self._rank}", json.dumps({**fields, "beats": self._beats}))

    def _states(self) -> dict[int, dict[str, Any] | None]:
        """Return what each other rank has posted, None where that is nothing yet."""
        return self._ask(lambda: {rank: self._read(rank) for rank in self._others})

    def _silence(self) -> str:
        return f"{self._who_serves} does not answer: it is stopped, or its node has gone"

    def _read(self, rank: int) -> dict[str, Any] | None:
        key = f"{rank}"
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def _report(self, stack: list[traceback.FrameSummary], waiting_s: float) -> None:
        lines = [f"{self._who} has waited {waiting_s:.0f} s in {_collective(stack)}:"]
        lines += [f"    {_place(one)}, in {one.name}" for one in _own(stack)]
        try:
            states = self._states()
            waiting = [r for r, s in states.items() if s and s["waiting_s"] > self._after_s / 2]
            if not waiting or self._rank < min(waiting):  # one rank tells of the others
                time.sleep(2 * self._interval_s)  # who lives has said something new by then
                lines += self._tell(states)
        except TimeoutError:
            lines.append(self._silence())
        sys.stderr.write("".join(f"[rank {self._rank}] {line}\n" for line in lines))
        sys.stderr.flush()

    def _tell(self, before: dict[int, dict[str, Any] | None]) -> list[str]:
        lines = []
        for (rank, old), new in zip(before.items(), self._states().values(), strict=True):
            if new is None:
                lines.append(f"rank {rank} has not come here")
            elif not new["ended"] and old is not None and new["beats"] == old["beats"]:
                lines.append(f"{new['who']} does not answer: it is stopped, or its node has gone")
            else:
                lines.append(f"{new['who']} {new['state']}")
        return lines


def _stack(frame: FrameType | None) -> list[traceback.FrameSummary]:
    """Return the frames of a thread, outermost first."""
    return list(traceback.extract_stack(frame)) if frame else []


def _own(stack: list[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    """Return the frames of the user's code: not Python's start, not torch's inside."""
    files = [one.filename for one in stack]
    own = [not file.startswith((_TORCH, "<frozen", __file__)) for file in files]
    inner = max((i for i, mine in enumerate(own) if mine), default=-1)
    return [one for one, mine in zip(stack[: inner + 1], own, strict=False) if mine]


def _collective(stack: list[traceback.FrameSummary]) -> str:
    """Return the function of torch.distributed, or DDP's backward, that the user's code is in."""
    files = [one.filename for one in stack]
    own = [i for i, file in enumerate(files) if not file.startswith(_TORCH)]
    for one in stack[own[-1] + 1 if own else 0 :]:
        if "/distributed/" in one.filename and one.name not in ("wrapper", "inner"):
            return f"{one.name}()"
        if one.filename.startswith(_TORCH) and one.name == "backward":
            return "backward(), where DDP exchanges gradients"
    return ""


def _describe(stack: list[traceback.FrameSummary]) -> str:
    own = _own(stack)
    place = f" at {_place(own[-1])}" if own else ""
    if collective := _collective(stack):
        return f"is in {collective}{place}"
    return f"is in no collective:{place}"


def _follows(error: BaseException) -> bool:
    return isinstance(error, RuntimeError) and bool(_CONSEQUENCE.search(str(error)))


def _name(error: BaseException) -> str:
    text = re.sub(r"^\[\S+\.(cc|cpp|h):\d+\] ", "", str(error) or "no message")  # gloo's own place
    return f"{type(error).__name__}: {text.splitlines()[0]}"


def _place_of(error: BaseException) -> str:
    own = _own(list(traceback.extract_tb(error.__traceback__)))
    return f" ({_place(own[-1])})" if own else ""


def _place(frame: traceback.FrameSummary) -> str:
    path, here = Path(frame.filename), Path.cwd()
    return f"{path.relative_to(here) if path.is_relative_to(here) else path} line {frame.lineno}"
