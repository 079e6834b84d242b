"""How long all-reduces and messages take, and what the plain network gives beside them.

Every rank of the job calls each function with the same arguments, and gets the same answer: the
slowest rank's time. Bandwidths as nccl-tests defines them (doc/PERFORMANCE.md there): algorithm
bandwidth is bytes / seconds; bus bandwidth is what each rank sends in a ring, and does not
depend on the number of ranks.
Lesson: notebooks/07_scaling.ipynb
"""

from __future__ import annotations

import math
import socket
import statistics
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ddp_helpers.bench.cost_model import Link, ring_bytes
from ddp_helpers.bench.replica_runner import now
from ddp_helpers.doctor import links
from ddp_helpers.worker.environment import LaunchEnvironment
from ddp_helpers.worker.network import is_loopback, resolve

REPEATS = 5


@dataclass(frozen=True)
class Timing:
    """The time of one call for one size: the median of the repeats, the least, the most."""

    bytes: int
    seconds: float
    least_s: float
    most_s: float

    def bytes_per_s(self) -> float:
        """Return the algorithm bandwidth."""
        return self.bytes / self.seconds

    def bus_bytes_per_s(self, ranks: int) -> float:
        """Return the bus bandwidth of an all-reduce."""
        return ring_bytes(self.bytes, ranks) / self.seconds


def all_reduce_timing(bytes: int, device: torch.device, budget_s: float = 1.0) -> Timing:
    """Time torch's all-reduce of bytes of float32."""
    tensor = torch.ones(bytes // 4, device=device)
    return timing(bytes, lambda: dist.all_reduce(tensor), device, budget_s)


def mpi_all_reduce_timing(bytes: int) -> Timing:
    """Time MPI's own all-reduce of bytes of float32, through mpi4py."""
    from mpi4py import MPI

    array = torch.ones(bytes // 4).numpy()
    call = lambda: MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, array)  # noqa: E731
    return timing(bytes, call, torch.device("cpu"))


def timing(
    bytes: int, call: Callable[[], object], device: torch.device, budget_s: float = 1.0
) -> Timing:
    """Time call in REPEATS blocks that take budget_s together, a block being one call or more."""
    call()  # opens connections, takes memory
    once = _seconds(call, 1, device)
    calls = max(1, min(round(budget_s / REPEATS / once), 2000))
    times = [_seconds(call, calls, device) / calls for _ in range(REPEATS)]
    return Timing(bytes, statistics.median(times), min(times), max(times))


def _seconds(call: Callable[[], object], calls: int, device: torch.device) -> float:
    """Return how long the slowest rank takes for so many calls that begin together."""
    dist.barrier()
    began = now(device)
    for _ in range(calls):
        call()
    return slowest(now(device) - began, device)


def slowest(seconds: float, device: torch.device, group: dist.ProcessGroup | None = None) -> float:
    """Return the most seconds that any rank of group gives, the same on each."""
    most = torch.tensor([seconds], dtype=torch.float64, device=device)
    dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
    return most.item()


def fit(timings: Sequence[Timing], ranks: int) -> Link:
    """Return the link whose ring all-reduces take these times, by least squares of relative errors.

    Raises ValueError for fewer than two sizes.
    """
    # seconds = a + b * bytes, each row divided by its seconds.
    rows = [(1 / one.seconds, one.bytes / one.seconds) for one in timings]
    if len({one.bytes for one in timings}) < 2:
        raise ValueError("the times of two sizes or more are needed to tell latency from rate")
    aa, ab, bb = (sum(x[i] * x[j] for x in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    a1, b1 = (sum(x[i] for x in rows) for i in (0, 1))
    determinant = aa * bb - ab * ab
    a, b = (a1 * bb - b1 * ab) / determinant, (b1 * aa - a1 * ab) / determinant
    return Link(max(a, 0.0) / (2 * (ranks - 1)), ring_bytes(1, ranks) / b)


def beside_computing(
    link: Link,
    step: Callable[[], object],
    bytes: int,
    ranks: int,
    device: torch.device,
    budget_s: float = 1.5,
) -> Link:
    """Return link with what computing and sending at the same time cost each other.

    step computes for a while and exchanges nothing. A thread sends all-reduces of bytes while
    step runs again and again.
    """
    step()
    once = _seconds(step, 1, device)
    steps = max(3, round(budget_s / once))
    alone_s = _seconds(step, steps, device)
    tensor, sent = torch.zeros(bytes // 4, device=device), []
    calls = math.ceil(2 * alone_s * link.bytes_per_s / ring_bytes(bytes, ranks))

    def send() -> None:
        for _ in range(calls):
            dist.all_reduce(tensor)
            sent.append(now(device))

    dist.barrier()
    thread = threading.Thread(target=send)
    began = now(device)
    thread.start()
    for _ in range(steps):
        step()
    ended = now(device)
    thread.join()
    last = min(ended, sent[-1])  # sending ends first where it is much faster than was thought
    done = sum(when <= last for when in sent)
    together_s = last - began
    rate = done * ring_bytes(bytes, ranks) / together_s
    lost = max((ended - began - alone_s) / together_s, 0.0)
    rate, lost = -slowest(-rate, device), slowest(lost, device)
    return Link(link.latency_s, link.bytes_per_s, min(rate, link.bytes_per_s), lost / rate)


def message_timing(
    bytes: int, first: int, second: int, rank: int, device: torch.device, repeats: int = 5
) -> Timing:
    """Time a message from rank first to rank second and back, halved; the others wait."""
    tensor, times = torch.zeros(max(bytes // 4, 1), device=device), []
    for _ in range(repeats + 1):
        dist.barrier()
        began = now(device)
        if rank == first:
            dist.send(tensor, second)
            dist.recv(tensor, second)
        elif rank == second:
            dist.recv(tensor, first)
            dist.send(tensor, first)
        here = now(device) - began if rank == first else 0.0
        times.append(slowest(here, device) / 2)
    times = times[1:]  # the first opens the connection
    return Timing(bytes, statistics.median(times), min(times), max(times))


def tcp_stream(
    first: int, second: int, env: LaunchEnvironment, address: str
) -> tuple[float, float]:
    """Return (seconds of a round trip, bytes/s) of plain TCP from rank first to rank second.

    address: of this rank, as the others reach it.
    """
    with links.Listener(env.rank, address) as listener:
        places: list = [None] * env.world_size
        dist.all_gather_object(places, listener.place)
        answer = None
        if env.rank == first:
            round_trip_s, bits_per_s = links.measure(tuple(places[second]))
            answer = (round_trip_s, bits_per_s / 8)
        answers: list = [None] * env.world_size
        dist.all_gather_object(answers, answer)
    return answers[first]


def own_address(env: LaunchEnvironment) -> str:
    """Return this rank's address on the way to rank 0's node; loopback in a job on one node."""
    master = resolve(env.master_addr or "127.0.0.1")
    if env.one_node:
        return "127.0.0.1"
    if is_loopback(master):  # rank 0's own name is loopback on its node: any other will do
        master = "192.0.2.1"
    with socket.socket(
        socket.AF_INET6 if ":" in master else socket.AF_INET, socket.SOCK_DGRAM
    ) as probe:
        probe.connect((master, 9))  # sends nothing
        return probe.getsockname()[0]


def node_pairs(hosts: Sequence[str]) -> list[tuple[int, int]]:
    """Return pairs of ranks to measure: two of each node, and the first ones of each two nodes."""
    first: dict[str, int] = {}
    pairs = []
    for rank, host in enumerate(hosts):
        if host in first:
            if not any(pair[0] == first[host] for pair in pairs):
                pairs.append((first[host], rank))
        else:
            first[host] = rank
    ranks = list(first.values())
    return pairs + [(a, b) for i, a in enumerate(ranks) for b in ranks[i + 1 :]]
