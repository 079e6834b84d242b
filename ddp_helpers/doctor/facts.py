"""What one rank knows about itself: the row of the doctor's table.

Lesson: notebooks/08_when_it_hangs.ipynb
"""

from __future__ import annotations

import os
import platform
import socket
import sys
from dataclasses import asdict, dataclass
from typing import Any

from ddp_helpers.launch.ssh_ask import versions
from ddp_helpers.worker import network
from ddp_helpers.worker.environment import LaunchEnvironment


@dataclass(frozen=True)
class Facts:
    """One rank. interface and address: where gloo or nccl will listen; place: the doctor does."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    launcher: str
    host: str
    pid: int
    backend: str
    device: str
    interface: str
    address: str  # "" when the interface is not there
    chosen_by: str  # the variable that names the interface; "" where process_group chooses it
    to_master: str  # the interface that leads to the master, whatever is chosen
    host_address: str  # what the host's own name resolves to; "" when it does not
    place: tuple[str, int] | None
    interpreter: str
    python: str
    torch: str
    ddp_helpers: str
    cores: int  # that this rank may use
    cores_of_node: int
    threads: int  # of torch

    def as_json(self) -> dict[str, Any]:
        """Return the fields, as JSON can hold them."""
        return asdict(self)


def from_json(fields: dict[str, Any]) -> Facts:
    """Return the Facts whose as_json() has given fields."""
    place = fields["place"]
    return Facts(**{**fields, "place": tuple(place) if place else None})


def gather(env: LaunchEnvironment, backend: str, interface: str | None) -> Facts:
    """Return the facts of this rank, without a place yet.

    interface: the one that leads to the master, which process_group takes unless a variable
    names another.
    """
    import torch

    variable = "NCCL_SOCKET_IFNAME" if backend == "nccl" else "GLOO_SOCKET_IFNAME"
    named = os.environ.get(variable, "").lstrip("=")
    if named.startswith("^"):  # nccl: any interface but these
        named = ""
    name = named.split(",")[0] or interface or ""
    addresses = dict(reversed(network.own_addresses()))  # the first of an interface: IPv4
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return Facts(
        rank=env.rank,
        world_size=env.world_size,
        local_rank=env.local_rank,
        local_world_size=env.local_world_size,
        launcher=env.launcher,
        host=socket.gethostname(),
        pid=os.getpid(),
        backend=backend,
        device=_device(env, backend),
        interface=name,
        address=addresses.get(name, ""),
        chosen_by=variable if named else "",
        to_master=interface or "",
        host_address=own_name_address(),
        place=None,
        interpreter=sys.executable,
        python=platform.python_version(),
        torch=torch.__version__,
        ddp_helpers=versions()["ddp_helpers"] or "not installed",
        cores=cores,
        cores_of_node=os.cpu_count() or 1,
        threads=torch.get_num_threads(),
    )


def _device(env: LaunchEnvironment, backend: str) -> str:
    import torch

    if backend == "gloo":
        return "cpu"
    if env.local_rank >= torch.cuda.device_count():
        return "none"
    return torch.cuda.get_device_name(env.local_rank)


def own_name_address() -> str:
    """Return the address that this host's own name resolves to, "" when it does not."""
    try:
        return network.resolve(socket.gethostname())
    except OSError:
        return ""
