"""Tracebacks and short error messages, found in output that ranks wrote between each other.

Lesson: notebooks/08_when_it_hangs.ipynb
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .output import Line


@dataclass(frozen=True)
class Report:
    """A traceback or a short error message that a process wrote."""

    position: int  # of its first line in the output
    line: Line
    rank: int | None
    text: str


_HEADER = "Traceback (most recent call last):"
_CHAIN = ("During handling of the above exception", "The above exception was the direct cause")
_ERROR = re.compile(r"(?:\S+: )?error: |\S*python\S*: (?:can't open file|No module named|Error )")
_RANK_PREFIX = re.compile(r"\[rank(\d+)\]: ?")  # torch's excepthook writes it before each line
_OTHER_TEXT = re.compile(
    r"\[[WE]\d|[WEI]\d{4} |frame #\d|Exception raised from |[-=]{20,}|\S+\.py:\d+: \w*Warning"
)
# torchrun's reactions to the failure of a rank, and to run_local's SIGTERM
_REACTION = re.compile(r"\n\S*(?:ChildFailedError|SignalException):")


def reports(lines: Sequence[Line]) -> Iterator[Report]:
    """Yield every traceback and error message, stream by stream: ranks write between each other."""
    streams: dict[tuple, list[tuple[int, str]]] = {}
    for position, line in enumerate(lines):
        prefix = _RANK_PREFIX.match(line.text)
        rank = int(prefix[1]) if prefix else None
        text = line.text[prefix.end() :] if prefix else line.text
        streams.setdefault((line.command, line.label, rank), []).append((position, text))
    has_labels = any(line.label for line in lines)
    for (_, label, rank), stream in streams.items():
        stderr = bool(label) and not label.endswith("<stdout>") or not has_labels
        end = 0
        for start, (position, text) in enumerate(stream):
            if start < end or not (text == _HEADER or stderr and _ERROR.match(text)):
                continue
            block = _block([text for _, text in stream[start : start + 500]])
            end = start + len(block)
            report = "\n".join(block)
            if not _REACTION.search(report):
                yield Report(position, lines[position], rank, report)


def _block(texts: Sequence[str]) -> list[str]:
    """Return the traceback or message that texts begin with, and the exceptions chained to it."""
    block = [texts[0]]
    in_message = texts[0] != _HEADER
    after_chain = False
    for position, text in enumerate(texts[1:], start=1):
        following = next((t for t in texts[position:] if t.strip()), "")
        if after_chain or following.startswith(_CHAIN):
            in_message = False
        elif in_message and (not text.strip() or text == _HEADER or _OTHER_TEXT.match(text)):
            break
        elif not text.startswith(" "):
            in_message = True
        block.append(text)
        if text.strip():
            after_chain = text.startswith(_CHAIN)
    return block
