"""What the doctor says: findings, and how a terminal and a program read them.

Lesson: notebooks/08_when_it_hangs.ipynb
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

LEVELS = ("ok", "warning", "fault")


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    level: str  # of LEVELS: a fault stops jobs, a warning may
    where: str  # a rank, a node, or what was looked at on this machine
    seen: str
    fix: str = ""  # what to type; empty for ok


def write(findings: Iterable[Finding]) -> str:
    """Return a line per finding, and under it what to type."""
    words = {"ok": "ok     ", "warning": "warning", "fault": "FAULT  "}
    lines = []
    for one in findings:
        first, *more = f"{words[one.level]}  {one.where}: {one.seen}".splitlines()
        lines += [first, *(f"         {line}" for line in more)]
        lines += [
            f"         {'fix: ' if number == 0 else '     '}{line}"
            for number, line in enumerate(one.fix.splitlines())
        ]
    return "\n".join(lines)


def is_healthy(findings: Iterable[Finding]) -> bool:
    """Return True when nothing that was found stops jobs."""
    return not any(one.level == "fault" for one in findings)


def write_table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return rows under names; a value of a column that differs from the most frequent gets a *."""
    columns = []
    for name, column in zip(names, zip(*rows, strict=True), strict=True):
        usual = max(column, key=column.count)
        marks = ["*" if name in ALIKE and value != usual else "" for value in column]
        cells = [name, *(f"{value}{mark}" for value, mark in zip(column, marks, strict=True))]
        width = max(map(len, cells))
        columns.append([cell.ljust(width) for cell in cells])
    return "\n".join("  ".join(row).rstrip() for row in zip(*columns, strict=True))


ALIKE = ("python", "torch", "ddp_helpers", "interpreter", "device")  # the same on every rank
