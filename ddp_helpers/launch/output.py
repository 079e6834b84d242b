"""Which rank wrote a line? A launcher merges what its ranks write; its labels take it apart.

run_local asks each launcher to put a label before every piece of output, and takes the labels
off again before a line is shown:

    torchrun      PET_TEE=2      [default1]:ValueError: ...            stderr only
    Open MPI      --tag-output   [1,1]<stderr>: ValueError: ...

Lesson: notebooks/08_when_it_hangs.ipynb
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from .commands import HostCommand

_TORCHRUN = re.compile(r"(\[default\d+\]):")
_OPEN_MPI = re.compile(r"(\[\d+,\d+\]<std(?:out|err)>):")
_OPEN_MPI_5 = re.compile(_OPEN_MPI.pattern + " ?")  # 4 writes no blank after the label
_NONE = re.compile(r"((?!))")


@dataclass(frozen=True)
class Line:
    """One whole line of a job's output, without its end."""

    text: str
    command: int  # which of the job's commands wrote it
    label: str = ""  # the launcher's label; "" for the launcher's own and for unlabelled output

    @property
    def local_rank(self) -> int | None:
        """The local rank in torchrun's label, the rank in Open MPI's; None without a label."""
        match = re.fullmatch(r"\[(?:default|1,)(\d+)\].*", self.label)
        return int(match[1]) if match else None


def label_variables(log_dir: str) -> dict[str, str]:
    """Return the variables that make torchrun label what its ranks write to stderr.

    torchrun keeps its copies in log_dir.
    """
    return {"PET_TEE": "2", "PET_LOG_DIR": log_dir}


def with_labels(command: HostCommand) -> tuple[str, ...]:
    """Return command's argv, with the option that makes Open MPI label its output."""
    if command.mpi and command.mpi.flavour == "Open MPI":
        return (command.argv[0], "--tag-output", *command.argv[1:])
    return command.argv  # MPICH puts labels into the middle of lines: better without


class LineReader:
    """Turns the bytes of one command's output into whole lines."""

    def __init__(self, command: HostCommand, number: int):
        mpi = command.mpi
        if mpi is None:
            self._labels = _TORCHRUN
        elif mpi.flavour != "Open MPI":
            self._labels = _NONE
        else:
            self._labels = _OPEN_MPI_5 if mpi.version >= (5,) else _OPEN_MPI
        self._number = number
        self._bytes = b""  # a line that has not ended yet
        self._begun: dict[str, str] = {}  # label -> a rank's line that has not ended yet

    def feed(self, data: bytes) -> list[Line]:
        """Return the lines that data completes."""
        *whole, self._bytes = (self._bytes + data).split(b"\n")
        return [line for raw in whole for line in self._split(raw)]

    def end(self) -> list[Line]:
        """Return what was written without an end of line."""
        lines = self._split(self._bytes) if self._bytes else []
        rest = [Line(text, self._number, label) for label, text in self._begun.items()]
        self._bytes, self._begun = b"", {}
        return lines + rest

    def _split(self, raw: bytes) -> list[Line]:
        """Split at the labels: a rank that has not ended its line is followed by another's."""
        text = raw.decode(errors="replace").rstrip("\r")
        unlabelled, *labelled = self._labels.split(text)
        pieces = [("", unlabelled)] if unlabelled or not labelled else []
        pieces += zip(labelled[::2], labelled[1::2], strict=True)
        for label, piece in pieces[:-1]:
            self._begun[label] = self._begun.get(label, "") + piece
        label, piece = pieces[-1]
        return [Line(self._begun.pop(label, "") + piece, self._number, label)]
