"""What ranks print in a cell, shown while it runs, and yet the same in every run.

First comes everything of rank 0, as it writes it, then rank 1, and so on.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from ddp_helpers.lesson.places import Rank


def label(rank: int, text: str) -> str:
    """Return text with [rank N] before each line, unless the rank has written that itself."""
    mark = f"[rank {rank}]"
    labelled = []
    for line in text.removesuffix("\n").split("\n") if text else []:
        line = line.rstrip("\r").rsplit("\r", 1)[-1]  # what a progress bar has drawn over
        labelled.append(line if line.startswith(mark) else f"{mark} {line}".rstrip())
    return "".join(f"{line}\n" for line in labelled)


class RankText:
    """Shows what ranks have written so far, whole lines, one rank after the other."""

    def __init__(self, ranks: Iterable[Rank]):
        self._waiting = sorted(ranks, key=lambda one: one.rank)
        self._offset = 0  # bytes already shown of the first rank that waits

    def show(self, finished: Collection[Rank]) -> None:
        while self._waiting:
            one = self._waiting[0]
            last = one in finished
            self._show_new(one, last)
            if not last:
                return
            self._waiting.pop(0)
            self._offset = 0

    def _show_new(self, one: Rank, last: bool) -> None:
        new = one.keeper.read(one.output, self._offset)
        if not last:
            new = new[: new.rfind(b"\n") + 1]
        self._offset += len(new)
        print(label(one.rank, new.decode(errors="replace")), end="", flush=True)
