"""Which rank failed first, and what did it say? Read from the output of a job that failed.

When one rank raises, the others lose their connection to it and raise as well, often before the
first traceback is out. Those are told apart here; torchrun's own summary names any of them.

Lesson: notebooks/08_when_it_hangs.ipynb
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from .output import Line
from .tracebacks import Report, reports


@dataclass(frozen=True)
class Failure:
    """The first failure of a job."""

    rank: int | None  # None: the launcher itself failed, or does not say
    exit_code: int | None  # negative: the number of the signal that ended it
    text: str  # its traceback or error message, else the last lines of output
    command: int | None = None  # which of the job's commands it came from


@dataclass(frozen=True)
class _Exit:
    """How one rank ended, as its launcher reports it."""

    command: int
    local_rank: int
    rank: int
    exit_code: int


def first_failure(lines: Sequence[Line]) -> Failure:
    """Return what made the job with this output fail."""
    exits = _exits(lines)
    found = sorted(reports(lines), key=lambda report: report.position)
    causes = [report for report in found if not _CONSEQUENCE.search(_message(report.text))]
    killed = [end for end in exits if end.exit_code < 0 and end.exit_code != -signal.SIGTERM]
    if causes or (found and not killed):
        report = (causes or found)[0]
        named = _NAMED_BY_ANOTHER.search(report.text)
        rank = int(named[1]) if named else _rank(report, lines, exits)
        code = next((end.exit_code for end in exits if end.rank == rank), None)
        return Failure(rank, code, report.text, report.line.command)
    for end in killed or exits:
        return Failure(end.rank, end.exit_code, _last_lines(lines, end), end.command)
    return Failure(None, None, _last_lines(lines))


# What the watchdog of a rank says when it has lost another one, which it knows.
_NAMED_BY_ANOTHER = re.compile(
    r"error: rank (\d+) on \S+ \(pid \d+\) (?:failed first|has left the process group)"
)
# What a rank says when another one has gone.
_CONSEQUENCE = re.compile(
    r"Connection (?:closed|reset|refused)|Broken pipe|remote process exited|ncclRemoteError"
    r"|[Tt]imed out|Socket Timeout|Dist(?:Network|Store)Error|output of rank 0|Look at their output"
    rf"|{_NAMED_BY_ANOTHER.pattern}"
)


def _message(report: str) -> str:
    """Return the last exception's type and text, without the frames."""
    return re.split(r"^ .*\n", report, flags=re.M)[-1]


_TORCHRUN_EXIT = re.compile(r"rank +: (\d+) \(local_rank: (\d+)\)\n +exitcode +: (-?\d+)")
_OPEN_MPI_EXIT = re.compile(r"Process name: +\[.*,(\d+)\]\n +Exit code: +(\d+)")
_OPEN_MPI_SIGNAL = re.compile(
    r"process rank (\d+) with PID \d+ on node \S+ exited on\s+signal (\d+)"
)


def _exits(lines: Sequence[Line]) -> list[_Exit]:
    """Return how ranks ended according to the launchers, the one they saw first in front."""
    exits = []
    for number in sorted({line.command for line in lines}):
        own = "\n".join(line.text for line in lines if line.command == number and not line.label)
        found = [
            _Exit(number, int(local_rank), int(rank), int(code))
            for rank, local_rank, code in _TORCHRUN_EXIT.findall(own)
        ]
        exits += reversed(found)  # torchrun puts the first failure it observed at the end
        for rank, code in _OPEN_MPI_EXIT.findall(own):
            exits.append(_Exit(number, int(rank), int(rank), int(code)))
        for rank, code in _OPEN_MPI_SIGNAL.findall(own):
            exits.append(_Exit(number, int(rank), int(rank), -int(code)))
    return exits


def _rank(report: Report, lines: Sequence[Line], exits: Sequence[_Exit]) -> int | None:
    """Return the rank that wrote report: torch's own prefix says, or the launcher's label."""
    if report.rank is not None or report.line.local_rank is None:
        return report.rank
    for end in exits:
        if (end.command, end.local_rank) == (report.line.command, report.line.local_rank):
            return end.rank
    only_one = all(line.command == report.line.command for line in lines)
    return report.line.local_rank if only_one else None


def _last_lines(lines: Sequence[Line], end: _Exit | None = None, count: int = 10) -> str:
    """Return the last lines of the rank that ended so, or of all before the launcher's report."""
    if end:
        own = [li for li in lines if (li.command, li.local_rank) == (end.command, end.local_rank)]
    texts = [line.text for line in (end and own) or _before_report(lines) if line.text.strip()]
    # mpirun explains at length what may be wrong when its daemon on another node is not there.
    reasons = [text for text in texts[:-count] if _NO_PROGRAM.search(text)]
    return "\n".join([*reasons, *texts[-count:]])


_NO_PROGRAM = re.compile(r"^\S+: .*: (?:No such file or directory|[Pp]ermission denied|not found)$")
_LAUNCHER_REPORT = re.compile(r"[WE]\d{4} \S+ \d+ \S*torch/distributed/elastic/|-{70,}|={70,}")


def _before_report(lines: Sequence[Line]) -> Sequence[Line]:
    for position, line in enumerate(lines):
        if not line.label and _LAUNCHER_REPORT.match(line.text):
            return lines[:position] or lines
    return lines
