"""Where in its cell a rank is now, even when it is blocked in C.

Each rank has registered faulthandler for a signal; the rank's stack then goes to a file.
Lesson: notebooks/08_when_it_hangs.ipynb
"""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddp_helpers.lesson.keeper import Keeper
from ddp_helpers.lesson.report import Frame


@dataclass(frozen=True, eq=False)
class Rank:
    """One engine: its MPI rank, its process, its ipyparallel view, and the keeper of its host."""

    rank: int
    pid: int
    view: Any
    keeper: Keeper

    @property
    def output(self) -> str:
        """The file on its host that holds what the rank has written in a cell."""
        return f"{self.keeper.folder}/output_of_{self.pid}"

    @property
    def stack(self) -> str:
        """The file on its host that holds the rank's stack, once for each signal."""
        return f"{self.keeper.folder}/stack_of_{self.pid}"


def find_places(ranks: Sequence[Rank]) -> dict[Rank, tuple[Frame, ...]]:
    """Return where in its cell each rank is now, outermost frame first."""
    before = {one: len(one.keeper.read(one.stack)) for one in ranks}
    for one in ranks:
        one.keeper.signal(one.pid, signal.SIGUSR1)
    end = time.monotonic() + 1
    text = dict.fromkeys(ranks, b"")
    while time.monotonic() < end:
        time.sleep(0.05)
        last, text = text, {one: one.keeper.read(one.stack, before[one]) for one in ranks}
        if last == text and all(text.values()):
            break
    return {one: parse_stack(text[one].decode(errors="replace")) for one in ranks}


def parse_stack(text: str) -> tuple[Frame, ...]:
    """Return the frames of the cell's thread in a faulthandler dump, outermost first."""
    for thread in text.split("(most recent call first):"):
        frames = re.findall(r'^  File "(.*)", line (\d+) in (.*)$', thread, re.MULTILINE)
        own = [i for i, frame in enumerate(frames) if Path(frame[0]).name == "in_rank.py"]
        if own:
            return tuple((file, int(line), name) for file, line, name in frames[: own[0]][::-1])
    return ()
