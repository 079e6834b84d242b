"""Who is this process? Read from the variables its launcher set: standard library only.

Copy this file alone.

    env = detect()          # once, in main(); from there pass env.rank, env.world_size, ... on
    print(explain())        # which launcher was found, from which variables, and why

Adding a launcher is adding a row to _LAUNCHERS.
Lesson: notebooks/01_processes_and_ranks.ipynb
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass


class LaunchEnvironmentError(RuntimeError):
    """The launcher's variables are incomplete or contradict each other; the text says which."""


@dataclass(frozen=True)
class LaunchEnvironment:
    """Who this process is. rank counts over the whole job, local_rank over one node."""

    launcher: str
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int | None = 0  # None: Open MPI and hydra do not say
    master_addr: str | None = None  # None: MPI launchers and srun do not set it
    master_port: int | None = None

    @property
    def one_node(self) -> bool:
        """True when every rank of the job runs on this node."""
        return self.local_world_size == self.world_size


@dataclass(frozen=True)
class _Launcher:
    """One row: the variables that only this launcher sets, and the variable of each field."""

    name: str
    markers: tuple[str, ...]
    rank: str
    world_size: str
    local_rank: str
    local_world_size: str
    node_rank: str | None = None
    sets_master: bool = False  # True: MASTER_ADDR and MASTER_PORT come with the launcher
    remedy: str = "Start the script through the launcher itself, not from a shell it opened."

    @property
    def variables(self) -> dict[str, str]:
        """Field name -> variable name, for the fields this launcher tells."""
        fields = ("rank", "world_size", "local_rank", "local_world_size", "node_rank")
        return {field: getattr(self, field) for field in fields if getattr(self, field)}


_HYDRA = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")

# Asked from top to bottom, the innermost launcher first: torchrun may run inside mpirun or Slurm,
# and mpirun inside Slurm, and then the outer launcher's variables are still there.
_LAUNCHERS = (
    # torchrun and torch.distributed.launch set the same variables: inside they are one launcher.
    _Launcher(
        "torchrun",
        ("TORCHELASTIC_RUN_ID",),
        *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"),
        sets_master=True,
    ),
    # Any of the four marks Open MPI, so that a missing one is noticed. OMPI_COMM_WORLD_NODE_RANK
    # is a rank within the node, not the node's number, and is not used.
    _Launcher(
        "Open MPI",
        tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
        *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        *("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ),
    # MPICH's and Intel MPI's process manager. srun sets PMI_* as well, so only MPI_LOCAL* tells.
    _Launcher("hydra", ("MPI_LOCALRANKID", "MPI_LOCALNRANKS"), *_HYDRA),
    # The step's own variables: SLURM_PROCID and SLURM_NTASKS are also set in a batch script and
    # in an interactive shell, where python is one process and not one of SLURM_NTASKS.
    _Launcher(
        "Slurm",
        ("SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE"),
        *("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
        *("SLURM_STEP_TASKS_PER_NODE", "SLURM_NODEID"),
        remedy="Start the script with srun.",
    ),
    # Only half of hydra's variables are left: an error that names the others.
    _Launcher("hydra", ("PMI_RANK", "PMI_SIZE"), *_HYDRA),
    _Launcher(
        "environment",
        ("RANK", "WORLD_SIZE"),
        *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
        remedy="Export all of RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE in every process\n"
        "or none of them (unset RANK WORLD_SIZE LOCAL_RANK), or use a launcher.",
    ),
)


def detect(environ: Mapping[str, str] = os.environ) -> LaunchEnvironment:
    """Return who this process is; a plain `python` run is rank 0 of 1. Nothing is written.

    Every field comes from one launcher, the innermost. Raises LaunchEnvironmentError, naming
    the variable, when one is missing, is not a number, is out of range or contradicts another.
    """
    launcher = _find_launcher(environ)
    if launcher is None:
        return LaunchEnvironment("python")
    values = _read_numbers(launcher, environ)
    master_addr, master_port = _read_master(launcher, environ)
    return LaunchEnvironment(
        launcher=launcher.name,
        **{"node_rank": None, **values},
        master_addr=master_addr,
        master_port=master_port,
    )


def explain(environ: Mapping[str, str] = os.environ) -> str:
    """Return, in a few lines, which launcher was found, from which variables, what was ignored."""
    launcher = _find_launcher(environ)
    used: list[str] = []
    if launcher is None:
        lines = ["launcher: python (no launcher's variables found: rank 0 of 1)"]
    else:
        used = [*launcher.markers, *launcher.variables.values(), "MASTER_ADDR", "MASTER_PORT"]
        marker = next(name for name in launcher.markers if name in environ)
        lines = [f"launcher: {launcher.name} (because {marker} is set)"]
        for field, name in launcher.variables.items():
            lines.append(f"  {field} from {name}={environ.get(name, '(not set)')}")
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            lines.append(f"  {name.lower()} from {name}={environ.get(name, '(not set)')}")
    for name in _other_variables(environ, used):
        lines.append(f"ignored: {name}={environ[name]}")
    return "\n".join(lines)


def add_local_rank_argument(parser: argparse.ArgumentParser) -> None:
    """Accept --local-rank and --local_rank on an argparse parser, and show neither in --help.

    torch.distributed.launch adds --local-rank=N to every script it starts (torch 1 wrote
    --local_rank). The value is not used: it is already in LOCAL_RANK.
    """
    parser.add_argument("--local-rank", "--local_rank", help=argparse.SUPPRESS)


def _find_launcher(environ: Mapping[str, str]) -> _Launcher | None:
    for launcher in _LAUNCHERS:
        if any(marker in environ for marker in launcher.markers):
            return launcher
    return None


def _read_numbers(launcher: _Launcher, environ: Mapping[str, str]) -> dict[str, int]:
    """Return the integer fields this launcher tells, checked against each other."""
    names = launcher.variables
    values = {f: _read_number(name, environ) for f, name in names.items() if environ.get(name)}
    _check_ranges(names, values)
    missing = [name for field, name in names.items() if field not in values]
    if missing:
        seen = next(name for name in launcher.markers if name in environ)
        raise LaunchEnvironmentError(
            f"{', '.join(missing)} not set, although {seen} says that"
            f" {launcher.name} started this process.\n{launcher.remedy}"
        )
    return values


def _read_number(name: str, environ: Mapping[str, str]) -> int:
    text = environ[name].strip()
    if name == "SLURM_STEP_TASKS_PER_NODE":
        return _tasks_on_this_node(text, environ)
    if not re.fullmatch(r"[0-9]+", text):
        raise LaunchEnvironmentError(f"{name}={text!r}, expected a whole number, 0 or more.")
    return int(text)


def _tasks_on_this_node(text: str, environ: Mapping[str, str]) -> int:
    """Return this node's entry of Slurm's list: 2(x3),1 means nodes with 2, 2, 2 and 1 tasks."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]+)(?:\(x([0-9]+)\))?", part)
        if not match:
            raise LaunchEnvironmentError(
                f"SLURM_STEP_TASKS_PER_NODE={text!r}, expected a list such as 2(x3),1."
            )
        counts += [int(match[1])] * int(match[2] or 1)
    if not environ.get("SLURM_NODEID"):
        raise LaunchEnvironmentError("SLURM_NODEID not set: start the script with srun.")
    node_rank = _read_number("SLURM_NODEID", environ)
    if node_rank >= len(counts):
        raise LaunchEnvironmentError(
            f"SLURM_NODEID={node_rank}, but SLURM_STEP_TASKS_PER_NODE={text} lists"
            f" {len(counts)} nodes."
        )
    return counts[node_rank]


def _check_ranges(names: Mapping[str, str], values: Mapping[str, int]) -> None:
    """Refuse 0 ranks, a rank that is not below its count, and more ranks on a node than in all."""
    for count in ("world_size", "local_world_size"):
        if values.get(count) == 0:
            raise LaunchEnvironmentError(f"{names[count]}=0, expected 1 or more.")
    for field, count in (("rank", "world_size"), ("local_rank", "local_world_size")):
        if field in values and count in values and values[field] >= values[count]:
            raise LaunchEnvironmentError(
                f"{names[field]}={values[field]}, expected"
                f" 0 <= {names[field]} < {values[count]} ({names[count]})."
            )
    if {"local_world_size", "world_size"} <= values.keys() and (
        values["local_world_size"] > values["world_size"]
    ):
        raise LaunchEnvironmentError(
            f"{names['local_world_size']}={values['local_world_size']} ranks on this node, but"
            f" {names['world_size']}={values['world_size']} in the whole job."
        )


def _read_master(launcher: _Launcher, environ: Mapping[str, str]) -> tuple[str | None, int | None]:
    """Return MASTER_ADDR and MASTER_PORT: both, or neither where the launcher sets neither."""
    found = {name: environ.get(name) for name in ("MASTER_ADDR", "MASTER_PORT")}
    missing = [name for name, value in found.items() if not value]
    if len(missing) == 2 and not launcher.sets_master:
        return None, None
    if missing:
        present = "TORCHELASTIC_RUN_ID" if len(missing) == 2 else (set(found) - set(missing)).pop()
        raise LaunchEnvironmentError(
            f"{' and '.join(missing)} not set, but {present} is: set both or neither."
        )
    port = _read_number("MASTER_PORT", environ)
    if not 1 <= port <= 65535:
        raise LaunchEnvironmentError(
            f"MASTER_PORT={port}, expected a port number from 1 to 65535, such as 29500."
        )
    return found["MASTER_ADDR"], port


def _other_variables(environ: Mapping[str, str], used: list[str]) -> list[str]:
    """Return the names of other launchers' variables that are set and were not read."""
    known: dict[str, None] = {"SLURM_NTASKS": None}
    for launcher in _LAUNCHERS:
        known.update(dict.fromkeys([*launcher.markers, *launcher.variables.values()]))
    return [name for name in known if name in environ and name not in used]
