"""How ranks find each other: check MASTER_ADDR and MASTER_PORT, then meet in rank 0's store.

Copy with environment.py and network.py.

torch's own rendezvous waits for its whole timeout and then cannot say for whom. Here what can be
checked is checked before waiting, and who has not come is named.
Source: torch.distributed.TCPStore. Lesson: notebooks/01_processes_and_ranks.ipynb
"""

from __future__ import annotations

import contextlib
import errno
import functools
import ipaddress
import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

try:
    from . import network
    from .environment import LaunchEnvironment, LaunchEnvironmentError
except ImportError:  # copied next to a script
    import network
    from environment import LaunchEnvironment, LaunchEnvironmentError


T = TypeVar("T")

_ALL_HERE = "all here"


class RendezvousError(RuntimeError):
    """The ranks did not meet; the text says who was missing, where, and what to type."""


def check_master(env: LaunchEnvironment) -> str | None:
    """Refuse a master that cannot work, and return the interface that leads to it.

    Raises LaunchEnvironmentError, without waiting, when MASTER_* is not set and the job spans
    nodes, does not resolve, is loopback although the job spans nodes, or is no address of rank
    0's node.
    """
    if env.master_addr is None:
        if env.one_node:
            return network.interface_to("127.0.0.1")
        raise LaunchEnvironmentError(_no_master(env))
    try:
        address = network.resolve(env.master_addr)
    except OSError:
        raise LaunchEnvironmentError(
            f"MASTER_ADDR={env.master_addr} does not resolve on {socket.gethostname()}.\n"
            f"Use an address of rank 0's node, or add the name to /etc/hosts on every node."
        ) from None
    interface = network.interface_to(address)
    if network.is_loopback(address) and not env.one_node:
        interface = _interface_beyond_loopback(env, address)
    if serves_store(env) and not network.is_mine(address):
        raise LaunchEnvironmentError(
            f"MASTER_ADDR={env.master_addr} ({address}) is no address of {socket.gethostname()},"
            f" where rank 0 runs.\nSet MASTER_ADDR to one of: {_own_addresses()}."
        )
    return interface


def _no_master(env: LaunchEnvironment) -> str:
    add = {
        "Open MPI": "With mpirun add: -x MASTER_ADDR=<first host> -x MASTER_PORT=29500",
        "hydra": "With mpiexec add: -genv MASTER_ADDR <first host> -genv MASTER_PORT 29500",
        "Slurm": "Before srun: export MASTER_ADDR=<first host> MASTER_PORT=29500",
    }
    return (
        f"MASTER_ADDR and MASTER_PORT not set, and the job spans nodes"
        f" ({env.local_world_size} of {env.world_size} ranks here).\n"
        + add.get(
            env.launcher, "In every process: export MASTER_ADDR=<first host> MASTER_PORT=29500"
        )
    )


def _interface_beyond_loopback(env: LaunchEnvironment, address: str) -> str | None:
    """Return the interface to the other nodes when MASTER_ADDR is loopback here; or refuse it.

    A Debian host maps its own name to 127.0.1.1, and torchrun's agents have met already: there
    the other nodes know the right address. localhost is right on no node but one.
    """
    if env.master_addr in {socket.gethostname(), socket.getfqdn()} - {"localhost"}:
        return network.outward_interface()
    # 127.0.0.2 and up are chosen on purpose: two "nodes" on the loopback of one machine.
    on_purpose = address.startswith("127.") and address not in ("127.0.0.1", "127.0.1.1")
    if on_purpose or env.launcher == "torchrun":
        return network.interface_to(address)
    # Another rank's node may not be rank 0's: its addresses would be the next mistake.
    which = f"; this node has: {_own_addresses()}" if env.rank == 0 else ": rank 0 lists them"
    raise LaunchEnvironmentError(
        f"MASTER_ADDR={env.master_addr} is {address}, a loopback address, but the job spans nodes"
        f" ({env.local_world_size} of {env.world_size} ranks here).\n"
        f"Set MASTER_ADDR to an address of rank 0's node{which}."
    )


def check_port(port: int) -> None:
    """On rank 0: raise LaunchEnvironmentError when MASTER_PORT cannot be listened on."""
    _listen("127.0.0.1", port).close()


def _listen(address: str, port: int) -> socket.socket:
    try:
        return network.listen(address, port)
    except OSError as error:
        owner = network.port_owner(port)
        reason = "is in use" if error.errno == errno.EADDRINUSE else f"({error.strerror})"
        raise LaunchEnvironmentError(
            f"MASTER_PORT={port} {reason} on {socket.gethostname()}"
            f"{f' by {owner}' if owner else ''}.\n"
            "Stop that process, or set another MASTER_PORT on every rank, such as"
            f" {network.free_port()}."
        ) from None


def _own_addresses() -> str:
    addresses = [ipaddress.ip_address(address) for _, address in network.own_addresses()]
    # A link-local address is no MASTER_ADDR: it means something else on each interface.
    outside = [str(one) for one in addresses if not (one.is_loopback or one.is_link_local)]
    return ", ".join(outside) or "none but loopback"


def serves_store(env: LaunchEnvironment) -> bool:
    """True when this process listens on MASTER_PORT: rank 0, unless torchrun's agent does it."""
    return env.rank == 0 and not (env.launcher == "torchrun" and _agent_serves_store())


def _agent_serves_store() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def meet(env: LaunchEnvironment, timeout_s: float) -> dist.Store:
    """Return a store that every rank of the job has reached.

    Raises RendezvousError on every rank after timeout_s seconds, naming the missing ranks.
    """
    deadline = time.monotonic() + timeout_s
    store = connect(env, deadline)
    try:
        meeting = functools.partial(_wait_for_all, env, store, deadline)
        return network.in_time(meeting, _left(deadline) + 3)
    except TimeoutError:
        raise RendezvousError(
            f"rank {env.rank}: rank 0's store does not answer any more.\n"
            "Rank 0 is stopped, or its node has gone."
        ) from None
    except dist.DistNetworkError as error:
        raise RendezvousError(
            f"rank {env.rank}: {str(error).splitlines()[0]}\n"
            "The connection to rank 0's store failed: look at the output of rank 0."
        ) from error


def say_connected(env: LaunchEnvironment, store: dist.Store) -> None:
    """Tell the others, through the group's store, that this rank has its connections."""
    store.set(f"connected {env.rank}", "yes")


def wait_until_connected(env: LaunchEnvironment, store: dist.Store, timeout_s: float) -> None:
    """Wait, at most timeout_s seconds, until every rank has its connections.

    A rank that leaves the group earlier would break those that are still connecting to it.
    """
    everyone = [f"connected {rank}" for rank in range(env.world_size)]
    deadline = time.monotonic() + timeout_s
    # Rank 0 has gone, or is stopped: nothing to wait for.
    with contextlib.suppress(dist.DistNetworkError, TimeoutError):
        network.in_time(lambda: _wait(store, everyone, deadline), timeout_s)


def _left(deadline: float) -> float:
    return max(deadline - time.monotonic(), 0.0)


def _agreed_port(deadline: float) -> int:
    try:
        return network.read_meeting_port(_left(deadline))
    except TimeoutError as error:
        raise RendezvousError(f"{error}") from None


def connect(env: LaunchEnvironment, deadline: float) -> dist.TCPStore:
    """Open the store's server on rank 0, or connect to it: raises RendezvousError at deadline."""
    address, port = network.resolve(env.master_addr or "127.0.0.1"), env.master_port
    if serves_store(env):
        store = _serve(address, port)
        if port is None:
            network.write_meeting_port(store.port)
        return store
    port = port or _agreed_port(deadline)
    if reason := network.wait_for_listener(address, port, _left(deadline)):
        raise RendezvousError(
            f"rank {env.rank}: no store at {env.master_addr or address}:{port}: {reason}.\n"
            "Is rank 0 started on that node, and is the port open to this one?"
        )
    return _client(env, address, port, deadline)


def _client(env: LaunchEnvironment, address: str, port: int, deadline: float) -> dist.TCPStore:
    """Return the connection to the store at address:port, or come back by the deadline.

    torch waits past its timeout for the first answer of a program that is no store.
    """

    def connect() -> dist.TCPStore:
        timeout = timedelta(seconds=max(_left(deadline), 0.1))
        return dist.TCPStore(address, port, None, False, timeout, wait_for_workers=False)

    try:
        return network.in_time(connect, _left(deadline) + 1)
    except TimeoutError:
        raise RendezvousError(
            f"rank {env.rank}: what listens at {address}:{port} does not answer as a store does.\n"
            "Look at the output of rank 0: it has ended, stands still, or another program has its"
            " port."
        ) from None


@functools.cache
def _serve(address: str, port: int | None) -> dist.TCPStore:
    """Open the store's server, once in the life of this process, on port or on any free one."""
    # Closed with the group, it could still be reached by a rank that is already on its way to
    # the next group. multi_tenant: a plain init_process_group of this process can use it too.
    # The socket is ours because torch's own is IPv6 and IPv4 in one: the server looks up the
    # name of every rank that connects, and then asks DNS even for names in /etc/hosts, so that
    # a name server that does not answer costs every rank 5 s or more.
    with _listen(address, port or 0) as server:
        port = server.getsockname()[1]
        return dist.TCPStore(
            address,
            port,
            None,  # told the number of ranks, torch would sleep a millisecond per rank
            True,
            wait_for_workers=False,  # _wait_for_all waits, and can say for whom
            multi_tenant=True,
            master_listen_fd=server.detach(),
        )


def _wait_for_all(env: LaunchEnvironment, store: dist.Store, deadline: float) -> dist.Store:
    """Announce this rank, wait until rank 0 has seen all, and return the group's own store."""
    # torchrun's agent keeps its store when it starts the ranks again. A store of rank 0's is new
    # then, and agents of several nodes may have counted different numbers of restarts.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if _agent_serves_store() else "0"
    job = dist.PrefixStore(f"ddp_helpers/{attempt}", store)
    me = f"pid {os.getpid()} on {socket.gethostname()}"
    if job.add(f"groups of rank {env.rank}", 1) == 1:
        job.set(f"who is rank {env.rank}", me)
    elif (other := job.get(f"who is rank {env.rank}").decode()) != me:
        raise RendezvousError(
            f"rank {env.rank} was started twice: {other}, and {me}.\n"
            "Stop the older job, or give each job a MASTER_PORT of its own."
        )
    number = job.add("groups", 1) if env.rank == 0 else _newest_group(env, job, deadline)
    store = _group(job, number)
    store.set(f"rank {env.rank}", f"{env.world_size} ({me})")
    verdict = _count_ranks(env, store, deadline) if env.rank == 0 else _hear(env, store, deadline)
    if verdict != _ALL_HERE:
        raise RendezvousError(verdict)
    return store


def _group(job: dist.Store, number: int) -> dist.Store:
    return dist.PrefixStore(f"group {number}", job)


def _newest_group(env: LaunchEnvironment, job: dist.Store, deadline: float) -> int:
    """On other ranks: return the number of rank 0's newest group, once there is one to join.

    A group that some ranks have waited for alone is over: it is not taken for the next one.
    """
    joined = f"last group of rank {env.rank}"
    last = job.add(joined, 0)

    def newest() -> int:
        number = job.add("groups", 0)
        over = number <= last or _group(job, number).check(["verdict"])
        return 0 if over else number

    number = _until(newest, deadline)
    if not number:
        raise RendezvousError(
            f"rank {env.rank}: rank 0 did not come in time.\n"
            "Look at the output of rank 0: it has not started, has failed, or waits elsewhere."
        )
    job.add(joined, number - last)
    return number


def _count_ranks(env: LaunchEnvironment, store: dist.Store, deadline: float) -> str:
    """On rank 0: wait for every rank, and tell all of them whether the group can start."""
    verdict = _ALL_HERE
    for rank in range(1, env.world_size):
        if not _wait(store, [f"rank {rank}"], deadline):
            verdict = _missing(env, store)
            break
        world_size, who = store.get(f"rank {rank}").decode().split(" ", 1)
        if int(world_size) != env.world_size:
            verdict = (
                f"rank {rank} {who} was started with a world size of {world_size}, rank 0 with"
                f" {env.world_size}.\nStart all ranks of a job with the same command."
            )
            break
    if env.master_addr is None:
        network.remove_meeting_port()
    store.set("verdict", verdict)
    if verdict != _ALL_HERE:  # let those who came hear it before the store closes with rank 0
        heard = [f"rank {rank} heard" for rank in _here(env, store) if rank != 0]
        _wait(store, heard, time.monotonic() + 1)
    return verdict


def _hear(env: LaunchEnvironment, store: dist.Store, deadline: float) -> str:
    # Rank 0 speaks first when the deadline passes: it knows who came.
    if not _wait(store, ["verdict"], deadline + 1):
        return _missing(env, store)
    verdict = store.get("verdict").decode()
    if verdict != _ALL_HERE:
        store.set(f"rank {env.rank} heard", "yes")
    return verdict


def _wait(store: dist.Store, keys: list[str], deadline: float) -> bool:
    """Return True as soon as the store has all keys, False when the deadline passes first."""
    # store.wait would print warnings of its own when the time is up.
    return _until(lambda: store.check(keys), deadline)


def _until(condition: Callable[[], T], deadline: float) -> T:
    """Return condition() as soon as it is true, or as it is when the deadline passes."""
    began = time.monotonic()
    while not (value := condition()):
        now = time.monotonic()
        if now > deadline:
            break
        time.sleep(min(max((now - began) / 20, 0.0001), 0.2))
    return value


def _here(env: LaunchEnvironment, store: dist.Store) -> list[int]:
    return [rank for rank in range(env.world_size) if store.check([f"rank {rank}"])]


def _missing(env: LaunchEnvironment, store: dist.Store) -> str:
    here = _here(env, store)
    missing = [str(rank) for rank in range(env.world_size) if rank not in here]
    return (
        f"{len(here)} of {env.world_size} ranks came in time; missing: rank {', '.join(missing)}.\n"
        "Look at their output: they have not started, have failed, or wait elsewhere."
    )
