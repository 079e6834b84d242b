"""Where in its cell a rank is now, even when it is blocked in C.

Each rank has registered faulthandler for a signal; the rank's stack then goes to a file.
Lesson: notebooks/08_when_it_hangs.ipynb
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddp_helpers.lesson.report import Frame


@dataclass(frozen=True, eq=False)
class Rank:
    """One engine: its MPI rank, its process, its ipyparallel view and the folder it writes to."""

    rank: int
    pid: int
    view: Any
    folder: Path

    @property
    def output(self) -> Path:
        return self.folder / f"output_of_{self.pid}"

    @property
    def stack(self) -> Path:
        return self.folder / f"stack_of_{self.pid}"


def find_places(ranks: Sequence[Rank]) -> dict[Rank, tuple[Frame, ...]]:
    """Return where in its cell each rank is now, outermost frame first."""
    before = {}
    for one in ranks:
        with contextlib.suppress(OSError):
            before[one] = one.stack.stat().st_size
            os.kill(one.pid, signal.SIGUSR1)
    end = time.monotonic() + 1
    text = dict.fromkeys(before, "")
    while time.monotonic() < end:
        time.sleep(0.05)
        last, text = text, {one: one.stack.read_text()[size:] for one, size in before.items()}
        if last == text and all(text.values()):
            break
    return {one: parse_stack(text.get(one, "")) for one in ranks}


def parse_stack(text: str) -> tuple[Frame, ...]:
    """Return the frames of the cell's thread in a faulthandler dump, outermost first."""
    for thread in text.split("(most recent call first):"):
        frames = re.findall(r'^  File "(.*)", line (\d+) in (.*)$', thread, re.MULTILINE)
        own = [i for i, frame in enumerate(frames) if Path(frame[0]).name == "in_rank.py"]
        if own:
            return tuple((file, int(line), name) for file, line, name in frames[: own[0]][::-1])
    return ()
