"""Open a process group that checks before it waits, and ends in bounded time.

Copy with environment.py and rendezvous.py (and network.py, which rendezvous.py needs).

    env = detect()
    with process_group(env) as device:
        ...

Lesson: notebooks/01_processes_and_ranks.ipynb
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist

try:
    from .environment import LaunchEnvironment, LaunchEnvironmentError, detect
    from .rendezvous import (
        RendezvousError,
        check_master,
        meet,
        say_connected,
        wait_until_connected,
    )
except ImportError:  # copied next to a script
    from environment import LaunchEnvironment, LaunchEnvironmentError, detect
    from rendezvous import (
        RendezvousError,
        check_master,
        meet,
        say_connected,
        wait_until_connected,
    )


@contextlib.contextmanager
def process_group(
    env: LaunchEnvironment, backend: str | None = None, timeout_s: float = 300.0
) -> Iterator[torch.device]:
    """Open the default process group for the with block and yield this rank's device.

    backend is "nccl", "gloo" or None (also "auto") for nccl where there is CUDA and gloo
    elsewhere. The device is cuda:local_rank with nccl and the CPU with gloo. timeout_s, in
    seconds, bounds the meeting of the ranks and every collective in the block. The group is
    destroyed when the block ends, however it ends.

    Raises LaunchEnvironmentError for a rank, address, port or backend that cannot work, before
    waiting, and RendezvousError when the ranks have not met after timeout_s.
    Source: torch.distributed.init_process_group. Lesson: notebooks/01_processes_and_ranks.ipynb
    """
    if dist.is_initialized():
        raise RendezvousError(
            "This process already has a process group.\n"
            "Leave the first `with process_group(...)` block, or call"
            " torch.distributed.destroy_process_group()."
        )
    _check_rank(env)
    backend, device = _choose_backend(env, backend)
    deadline = time.monotonic() + timeout_s
    with interface_variables(check_master(env)):
        store = meet(env, timeout_s) if env.world_size > 1 else dist.HashStore()
        _initialise(env, backend, device, store, deadline, timeout_s)
        say_connected(env, store)
        try:
            yield device
        finally:
            wait_until_connected(env, store, timeout_s=5.0)
            dist.destroy_process_group()


def _check_rank(env: LaunchEnvironment) -> None:
    """Refuse a rank that is not the launcher's: others would wait for the one that is missing."""
    try:
        launched = detect()
    except LaunchEnvironmentError:  # env was made by hand
        return
    if launched.launcher == env.launcher and launched.rank != env.rank:
        hint = " (this is the local rank)" if env.rank == launched.local_rank else ""
        raise LaunchEnvironmentError(
            f"rank {env.rank}{hint} was given, but this process was started as rank"
            f" {launched.rank} of {launched.world_size}.\n"
            "Hand on what detect() returns as it is."
        )


def _choose_backend(env: LaunchEnvironment, backend: str | None) -> tuple[str, torch.device]:
    if backend in (None, "auto"):
        backend = "nccl" if torch.cuda.is_available() else "gloo"
    if backend == "gloo":
        return backend, torch.device("cpu")
    if backend != "nccl":
        raise LaunchEnvironmentError(f"backend {backend!r}, expected 'gloo' or 'nccl'.")
    if not torch.cuda.is_available():
        raise LaunchEnvironmentError(
            "backend nccl needs a CUDA device and torch sees none: use gloo (--backend gloo)."
        )
    if env.local_rank >= torch.cuda.device_count():
        raise LaunchEnvironmentError(
            f"local rank {env.local_rank} needs cuda:{env.local_rank}, but"
            f" {torch.cuda.device_count()} CUDA device(s) are visible to"
            f" {env.local_world_size} ranks on this node.\n"
            f"Start at most {torch.cuda.device_count()} ranks here, or use gloo."
        )
    device = torch.device("cuda", env.local_rank)
    torch.cuda.set_device(device)
    return backend, device


@contextlib.contextmanager
def interface_variables(interface: str | None) -> Iterator[None]:
    """Tell gloo and nccl which interface to use, unless the user has."""
    # gloo binds to whatever the host name resolves to, often 127.0.1.1: then nodes cannot meet.
    # "=" asks nccl for exactly this name, and not for every name that begins with it.
    values = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}
    chosen = {name: value for name, value in values.items() if interface and name not in os.environ}
    os.environ.update(chosen)
    try:
        yield
    finally:
        for name in chosen:
            os.environ.pop(name, None)


def _initialise(
    env: LaunchEnvironment,
    backend: str,
    device: torch.device,
    store: dist.Store,
    deadline: float,
    timeout_s: float,
) -> None:
    """Call init_process_group and come back by the deadline.

    gloo's own connection phase can stay silent far past its timeout on one rank when another
    cannot be reached, and cannot be interrupted. So it runs in a thread that may be left behind.
    """
    failure: list[BaseException] = []

    def initialise() -> None:
        try:
            options = {"device_id": device} if device.type == "cuda" else {}
            store.set_timeout(timedelta(seconds=timeout_s))
            dist.init_process_group(
                backend,
                store=store,
                rank=env.rank,
                world_size=env.world_size,
                timeout=timedelta(seconds=timeout_s),
                **options,
            )
        except Exception as error:
            failure.append(error)

    thread = threading.Thread(target=initialise, daemon=True)
    thread.start()
    thread.join(max(deadline - time.monotonic(), 0) + 2)
    if thread.is_alive() or failure:
        variable = "NCCL_SOCKET_IFNAME" if backend == "nccl" else "GLOO_SOCKET_IFNAME"
        first_line = str(failure[0]).splitlines()[0] if failure else f"no answer in {timeout_s:g} s"
        raise RendezvousError(
            f"rank {env.rank} met the other ranks at the master, but {backend} could not connect"
            f" them: {first_line}\n"
            f"{variable}={os.environ.get(variable, '(not set)')}: it must be, on each node, the"
            " interface that the other nodes reach."
        ) from (failure[0] if failure else None)
