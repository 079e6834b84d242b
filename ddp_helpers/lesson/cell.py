"""Run one %%px cell on ranks that may raise, hang or die, and always come back.

Lesson: notebooks/08_when_it_hangs.ipynb
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from ddp_helpers.lesson import in_rank
from ddp_helpers.lesson.places import Rank, find_places
from ddp_helpers.lesson.rank_text import RankText, label
from ddp_helpers.lesson.report import GO_ON, Frame, Outcome, shorten, write_report

_POLL_S = 0.03
_GRACE_S = 2.0  # for the other ranks to end by themselves once one has raised
_SETTLE_S = 5.0  # and at most this much more, until those that wait stand still
_STOP_S = 1.0  # for an interrupted rank to come back


class RanksFailed(RuntimeError):
    """A cell did not finish on every rank: the text says on which, why, and where they are.

    tracebacks: rank -> the full Python traceback, of the ranks that raised.
    """

    def __init__(self, text: str, tracebacks: Mapping[int, str] | None = None):
        super().__init__(text)
        self.tracebacks = dict(tracebacks or {})

    def _render_traceback_(self) -> list[str]:  # IPython shows this, and not our own call stack
        return f"{type(self).__name__}: {self}".splitlines()


def start_cell(ranks: Sequence[Rank], source: str, name: str) -> dict[Rank, Any]:
    """Start source on ranks and return {rank: pending result}. name marks it in tracebacks."""
    for one in ranks:
        one.keeper.remove(one.output)
    return {one: one.view.apply_async(in_rank.run_cell, source, name, one.output) for one in ranks}


def finish_cell(
    pending: Mapping[Rank, Any],
    name: str,
    timeout_s: float,
    why_gone: Callable[[], str | None] = lambda: None,
) -> None:
    """Wait for a started cell, and show its text and pictures in rank order.

    why_gone returns the reason once the ranks' processes have ended. Raises RanksFailed unless
    every rank finishes within timeout_s seconds; ranks that can be stopped are then stopped.
    """
    text = RankText(pending)
    try:
        headline = _wait(pending, text, timeout_s, why_gone)
    except KeyboardInterrupt:
        headline = "the cell was interrupted"
    gone = why_gone()
    busy = [] if gone else still_busy(pending)
    places = find_places(busy) if busy else {}
    _interrupt(places, pending)
    text.show(pending)
    results = {one: _result(pending[one]) for one in pending if pending[one].ready()}
    for one, result in results.items():
        _display(one.rank, result["displays"])
    outcomes = [_outcome(one, results.get(one), places.get(one)) for one in pending]
    if headline or any(outcome.state != "finished" for outcome in outcomes):
        errors = {one.rank: result["error"] for one, result in results.items() if result["error"]}
        raise RanksFailed(
            f"{gone}\n{GO_ON}" if gone else write_report(outcomes, name, headline),
            {rank: error["traceback"] for rank, error in errors.items()},
        )


def still_busy(pending: Mapping[Rank, Any]) -> list[Rank]:
    """Return the ranks that have not come back from a started cell."""
    return [one for one, result in pending.items() if not result.ready()]


def _wait(
    pending: Mapping[Rank, Any],
    text: RankText,
    timeout_s: float,
    why_gone: Callable[[], str | None],
) -> str:
    """Return "" when all ranks are back or one has raised, and else why waiting has no use."""
    deadline = time.monotonic() + timeout_s
    raised_at, places = None, None
    while busy := still_busy(pending):
        now = time.monotonic()
        text.show([one for one in pending if one not in busy])
        if reason := why_gone():
            return reason
        if now > deadline:
            return f"the cell did not end within {timeout_s:g} s"
        if raised_at is None and any(
            _result(pending[one])["error"] for one in pending if one not in busy
        ):
            raised_at = now
        if raised_at is not None and now > raised_at + _GRACE_S:
            places_before, places = places, find_places(busy)
            if places == places_before or now > raised_at + _GRACE_S + _SETTLE_S:
                return ""
        time.sleep(_POLL_S)
    return ""


def _interrupt(ranks: Collection[Rank], pending: Mapping[Rank, Any]) -> None:
    """Raise KeyboardInterrupt in ranks; those that wait in C stay there."""
    for one in ranks:
        one.keeper.signal(one.pid, signal.SIGINT)
    end = time.monotonic() + _STOP_S
    while time.monotonic() < end and not all(pending[one].ready() for one in ranks):
        time.sleep(_POLL_S)


def _result(ready: Any) -> dict[str, Any]:
    try:
        return ready.get()
    except Exception as failure:  # the engine could not run a cell at all
        error = {"type": type(failure).__name__, "message": str(failure), "frames": []}
        return {"error": {**error, "traceback": str(failure)}, "displays": []}


def _outcome(one: Rank, result: dict | None, place: tuple[Frame, ...] | None) -> Outcome:
    if result is None:
        return Outcome(one.rank, "busy", frames=place or ())
    error = result["error"]
    if error is None:
        return Outcome(one.rank, "finished")
    if place is not None and error["type"] == "KeyboardInterrupt":
        return Outcome(one.rank, "stopped", frames=place)
    text = f"{error['type']}: {shorten(error['message'])}".rstrip(": ")
    return Outcome(one.rank, "raised", text, tuple(map(tuple, error["frames"])))


def _display(rank: int, displays: Sequence[tuple[dict, dict]]) -> None:
    from IPython.display import display

    for data, metadata in displays:
        if set(data) == {"text/plain"}:
            print(label(rank, data["text/plain"]), end="")
        else:
            # Not printed: stored notebooks gather all printed text in front of the pictures.
            display({"text/plain": f"[rank {rank}] shows:"}, raw=True)
            display(data, metadata=metadata, raw=True)
