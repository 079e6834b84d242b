"""`bench train` and `bench allreduce` in every rank of one job: measure, and let rank 0 tell.

Rank counts are the first n ranks of the job, so that all counts are measured in one run, in turn:
a busy moment of the machine hits all of them.
Lesson: notebooks/07_scaling.ipynb
"""

from __future__ import annotations

import argparse
import socket
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

from ddp_helpers.bench import collectives, parts
from ddp_helpers.bench.cost_model import Link
from ddp_helpers.bench.record import read_record, write_record
from ddp_helpers.bench.replica_runner import Runner, now
from ddp_helpers.worker.environment import LaunchEnvironment

WARM_UP = 3  # steps: DDP decides on its buckets after the first, caches fill, the allocator grows
WARM_UP_POWERSGD = 13  # it sends whole gradients in the first 10
LINK_SIZES = tuple(1 << power for power in (12, 16, 20, 22, 24))  # 4 KiB to 16 MiB
SLOW_S = 1.0  # a size is not measured when the one before took longer
BESIDE_BYTES = 1 << 22


def train(
    bench: argparse.Namespace,
    args: argparse.Namespace,
    env: LaunchEnvironment,
    device: torch.device,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Measure images/s for each of bench.ranks, then a step's parts and the link.

    args: of train_resnet. Returns the record; it is written to bench.out after each round, and
    continued from there.
    """
    settings = {"ranks": bench.ranks, "strong": bench.strong, "world_size": env.world_size}
    settings |= {name: value for name, value in vars(args).items() if name not in _NOT_SETTINGS}
    record = _from_rank_0(env, lambda: read_record(bench.out, settings))
    rounds = record.setdefault("rounds", [])
    groups = {n: None if n == env.world_size else dist.new_group(range(n)) for n in bench.ranks}
    if len(rounds) < bench.rounds:
        runners = _runners(bench, args, env, device, groups)
        for number in range(len(rounds), bench.rounds):
            # In turn forwards and backwards: what drifts during a round favours none.
            order = bench.ranks if number % 2 == 0 else bench.ranks[::-1]
            found = {n: _throughput(runners.get(n), groups[n], env, device, bench) for n in order}
            rounds.append({str(n): found[n] for n in bench.ranks})
            if env.rank == 0:
                write_record(bench.out, record)
                speeds = ", ".join(f"{n}: {found[n]['images_per_s']:.1f}" for n in bench.ranks)
                say(f"round {number + 1} of {bench.rounds}   ranks: images/s   {speeds}")
        del runners
    # PowerSGD's bytes are no part of those of the gradients: there is nothing to predict with.
    if env.world_size > 1 and "link" not in record and args.compress != "powersgd":
        say("where a step's time goes")
        record["parts"] = parts.measure(_share(bench, args, env.world_size), env, device)
        say("the link between the ranks")
        mine = _share(bench, args, env.world_size)
        record["link"] = asdict(_link(mine, env, device, bench.seconds))
        if env.rank == 0:
            write_record(bench.out, record)
    if bench.trace:
        path = parts.write_trace(args, env, device, bench.trace)
        say(f"trace: {path} and those of the other ranks, for https://ui.perfetto.dev")
    return record


_NOT_SETTINGS = (
    "local_rank",
    "result_dir",
    "gather_results",
    "save",
    "resume",
    "epochs",
    "timeout",
)


def _from_rank_0(env: LaunchEnvironment, read: Callable[[], dict]) -> dict[str, Any]:
    """Return what read returns on rank 0, on every rank; or raise what it raises, on every rank."""
    told: list = [None]
    if env.rank == 0:
        try:
            told = [read()]
        except Exception as error:
            told = [error]
    dist.broadcast_object_list(told)
    if isinstance(told[0], Exception):
        raise told[0]
    return told[0]


def _runners(bench, args, env, device, groups) -> dict[int, Runner]:
    """Return this rank's replica for each number of ranks that it belongs to, warmed up."""
    runners = {}
    for n in bench.ranks:
        if env.rank < n:
            runners[n] = Runner(_share(bench, args, n), env, n, device, groups[n])
            for _ in range(WARM_UP_POWERSGD if args.compress == "powersgd" else WARM_UP):
                runners[n].step()
        dist.barrier()
    return runners


def _share(bench, args: argparse.Namespace, ranks: int) -> argparse.Namespace:
    """Return args with the batch of one of ranks."""
    batch = args.batch_size // ranks if bench.strong else args.batch_size
    return argparse.Namespace(**{**vars(args), "batch_size": batch})


def _throughput(runner, group, env, device, bench) -> dict[str, float]:
    """Return what the ranks of runner do in about bench.seconds; the other ranks wait."""
    found: list = [None]
    if runner:
        runner.step()  # what the wait has cooled down
        once = timed(runner, 1, group, device)["seconds"]
        found = [timed(runner, max(2, round(bench.seconds / once)), group, device)]
    # The others wait here. Rank 0 belongs to every number of ranks.
    dist.broadcast_object_list(found)
    return found[0]


def timed(runner: Runner, steps: int, group, device) -> dict[str, float]:
    """Do steps together; images of all ranks, by the clock of the slowest."""
    alone = runner.ranks == 1
    if not alone:
        dist.barrier(group)
    began = now(device)
    images = sum(runner.step() for _ in range(steps))
    seconds = now(device) - began
    if not alone:
        seconds = collectives.slowest(seconds, device, group)
        images *= runner.ranks  # every rank has full batches only
    return {"images_per_s": images / seconds, "step_s": seconds / steps, "seconds": seconds}


def _link(args, env: LaunchEnvironment, device: torch.device, budget_s: float) -> Link:
    timings = []
    for size in LINK_SIZES:
        timings.append(collectives.all_reduce_timing(size, device, budget_s))
        if timings[-1].seconds > SLOW_S:
            break
    link = collectives.fit(timings, env.world_size)
    runner = Runner(args, env, env.world_size, device, None)
    for _ in range(WARM_UP):
        runner.step()

    def step() -> None:
        runner.step(exchange=False)

    n = env.world_size
    return collectives.beside_computing(link, step, BESIDE_BYTES, n, device, budget_s)


def all_reduce(
    bench: argparse.Namespace,
    env: LaunchEnvironment,
    device: torch.device,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Measure all-reduces of bench.sizes, messages and plain TCP; return the record."""
    n = env.world_size
    record: dict[str, Any] = {"ranks": n, "all_reduce": {}, "not_measured": {}}
    ways = {dist.get_backend(): lambda size: collectives.all_reduce_timing(size, device)}
    why = _no_mpi(env)
    if why:
        record["not_measured"]["mpi4py"] = why
    else:
        ways["mpi4py"] = collectives.mpi_all_reduce_timing
    for name, time_one in ways.items():
        timings: list[collectives.Timing] = []
        for size in bench.sizes:
            if timings and timings[-1].seconds > SLOW_S:
                break
            timings.append(time_one(size))
        record["all_reduce"][name] = [
            {
                **asdict(one),
                "bytes_per_s": one.bytes_per_s(),
                "bus_bytes_per_s": one.bus_bytes_per_s(n),
            }
            for one in timings
        ]
        if len(timings) > 1:
            record.setdefault("links", {})[name] = asdict(collectives.fit(timings, n))
        say(f"{name}: {len(timings)} sizes")
    hosts: list = [None] * n
    dist.all_gather_object(hosts, socket.gethostname())
    record["hosts"] = hosts
    record["pairs"] = [_pair(a, b, env, device) for a, b in collectives.node_pairs(hosts)]
    return record


def _no_mpi(env: LaunchEnvironment) -> str:
    """Return why mpi4py cannot measure in this job, "" when it can; the same on every rank."""
    if env.launcher not in ("Open MPI", "hydra"):
        return "the ranks were not started by mpirun: add --launcher mpirun"
    try:
        from mpi4py import MPI

        size = MPI.COMM_WORLD.Get_size()
    except (ImportError, RuntimeError) as error:
        return str(error).splitlines()[0]
    if size != env.world_size:
        return (
            f"mpi4py belongs to another MPI than mpirun: it sees {size} of {env.world_size} ranks"
        )
    return ""


def _pair(first: int, second: int, env, device) -> dict[str, Any]:
    latency = collectives.message_timing(4, first, second, env.rank, device)
    size = 1 << 23
    message = collectives.message_timing(size, first, second, env.rank, device)
    round_trip_s, tcp = collectives.tcp_stream(first, second, env, collectives.own_address(env))
    return {
        "ranks": [first, second],
        "latency_s": latency.seconds,
        "bytes_per_s": size / (message.seconds - latency.seconds),
        "tcp_round_trip_s": round_trip_s,
        "tcp_bytes_per_s": tcp,
    }
