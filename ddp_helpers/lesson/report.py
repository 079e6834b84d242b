"""What a learner reads when a %%px cell did not end well: who, what, where, and how to go on.

Only what is the same in every run is written, so that a lesson can store it: no process number,
no address, no line number of a library.
"""

from __future__ import annotations

import linecache
import re
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import ddp_helpers

Frame = tuple[str, int, str]  # file, line number, function

GO_ON = "Go on with new ranks: engines.restart()"

_PACKAGE = Path(ddp_helpers.__file__).parent
_LIBRARIES = tuple(
    sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")
)
# gloo's words on a rank that was waiting for one that has left: which of them is chance.
_LOST = re.compile(r"connection (was )?(closed|reset)|broken pipe", re.IGNORECASE)
# What a rank says when it is another rank that failed first.
_CONSEQUENCE = re.compile(f"{_LOST.pattern}|timed? ?out|c[ao]me in time|no answer", re.IGNORECASE)


@dataclass(frozen=True)
class Outcome:
    """How a cell ended on one rank: finished, raised, stopped (by us) or busy."""

    rank: int
    state: str
    error: str = ""  # of a raised one: "ValueError: the text"
    frames: tuple[Frame, ...] = ()  # outermost first: where it raised, or where it still is

    @property
    def order(self) -> tuple[int, int]:
        """Causes before consequences, then rank by rank; never by time, which differs."""
        states = ("raised", "then raised", "busy", "stopped", "finished")
        return states.index("then raised" if self.is_consequence else self.state), self.rank

    @property
    def is_consequence(self) -> bool:
        return self.state == "raised" and bool(_CONSEQUENCE.search(self.error))


def write_report(outcomes: Iterable[Outcome], cell: str, headline: str = "") -> str:
    """Return the lines for a cell that did not finish on every rank.

    Ranks with the same end at the same place share a paragraph.
    """
    groups: dict[tuple, list[Outcome]] = {}
    outcomes = _by_the_same_timeout(list(outcomes))
    for one in sorted(outcomes, key=lambda outcome: outcome.order):
        key = (one.state, one.error, tuple(trail(one.frames, cell)))
        groups.setdefault(key, []).append(one)
    lines = [headline] if headline else []
    for (_, _, places), group in groups.items():
        lines.append(_sentence(group, where=" at" if places else "", first=not lines))
        lines += [f"    {place}" for place in places]
    # Ranks that have not met count their process groups differently from then on.
    if any(s in ("busy", "stopped") or e.startswith("RendezvousError") for s, e, _ in groups):
        lines.append(GO_ON)
    return "\n".join(lines)


def trail(frames: Sequence[Frame], cell: str) -> list[str]:
    """Return one line for each frame the learner can read: of cells, own files and this package."""
    return [line for frame in frames if (line := _place(frame, cell))]


def shorten(message: str) -> str:
    """Return an error's text without what torch adds and what differs: C++ places and ports."""
    if _LOST.search(message):
        return "Connection closed by peer"
    message = re.sub(r"^\[\S+\.(cc|cpp|h):\d+\] ", "", message.strip())
    message = re.split(r"\n(Exception raised from|C\+\+ CapturedTraceback)", message)[0]
    return "\n    ".join(line for line in message.splitlines() if line.strip())


def _by_the_same_timeout(outcomes: list[Outcome]) -> list[Outcome]:
    """Give ranks that lost the connection to one that timed out the same error.

    They waited just as long: which of them gives up first, and so closes the connection, is
    chance.
    """
    timeouts = sorted(one.error for one in outcomes if "Timed out waiting" in one.error)
    if not timeouts:
        return outcomes
    return [replace(o, error=timeouts[0]) if _LOST.search(o.error) else o for o in outcomes]


def name_ranks(numbers: Sequence[int]) -> str:
    """Return "rank 1" or "ranks 1, 2"."""
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def _sentence(group: Sequence[Outcome], where: str, first: bool) -> str:
    one = group[0]
    who = name_ranks([outcome.rank for outcome in group])
    is_, was = ("is", "was") if len(group) == 1 else ("are", "were")
    if one.state == "raised":
        then = " then" if one.is_consequence and not first else ""
        return f"{who}{then} raised {one.error}"
    return {
        "busy": f"{who} {is_} still waiting{where}",
        "stopped": f"{who} {was} stopped{where}",
        "finished": f"{who} finished",
    }[one.state]


def _place(frame: Frame, cell: str) -> str | None:
    file, number, function = frame
    code = linecache.getline(file, number).strip()
    inside = f", in {function}" if function != "<module>" else ""
    if file == cell:
        return f"line {number} of the cell{inside}: {code}"
    if file.startswith("<px "):
        return f"line {number} of an earlier cell{inside}: {code}"
    path = Path(file)
    if path.is_relative_to(_PACKAGE):
        name = path.relative_to(_PACKAGE.parent).as_posix()
        # Without the number: it changes with every edit of the package.
        return None if "lesson/" in name else f"{name}{inside}: {code}"
    if file.startswith(_LIBRARIES) or file.startswith("<"):
        return None
    return f"{path.name} line {number}{inside}: {code}"
