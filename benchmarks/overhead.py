"""What the helpers cost, beside the same written by hand: python benchmarks/overhead.py

Two ranks on this machine's CPU, one thread each, no launcher. The two sides take turns, so that a
busy moment hits both:

- images/s of train_resnet on synthetic images, beside a bare DDP loop with the same model, batch
  and optimizer (goal: at least 0.98 of it);
- time to the first collective through process_group, beside a bare init_process_group (goal: at
  most 1.05 of it).

Prints medians and means, and exits with status 1 when a goal is missed. Two minutes on two free
cores.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torchvision.models import get_model

from ddp_helpers.scripts import train_resnet
from ddp_helpers.worker.environment import detect
from ddp_helpers.worker.network import free_port
from ddp_helpers.worker.process_group import process_group

RANKS = 2
IMAGES = 512


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=15, help="measurements of each side")
    parser.add_argument("--batch_size", type=int, default=32, help="images per rank and batch")
    parser.add_argument("--image_size", type=int, default=32)
    args = parser.parse_args()

    speeds = in_ranks(compare_speed, args)[0]
    speed = report("images/s", "train_resnet", "bare loop", speeds)
    # Every time in new processes: a second group in one process is quicker. Times of a few
    # milliseconds scatter far more than speeds, and are quicker to take.
    times = in_turn(
        lambda: max(in_ranks(through_process_group, args)),
        lambda: max(in_ranks(through_init, args)),
        10 * args.pairs,
    )
    group = report("ms to the first collective", "process_group", "init_process_group", times)
    return 0 if speed >= 0.98 and group <= 1.05 else 1


def report(what: str, ours: str, bare: str, pairs: list[tuple[float, float]]) -> float:
    """Print medians and means of both sides and return the median of the pairs' ratios."""
    ratio = statistics.median(a / b for a, b in pairs)
    sides = list(zip(*pairs, strict=True))
    (a, b), (mean_a, mean_b) = (map(of, sides) for of in (statistics.median, statistics.mean))
    print(
        f"{what}: {ours} {a:.1f} (mean {mean_a:.1f}), {bare} {b:.1f} (mean {mean_b:.1f}),"
        f" ratio {ratio:.3f} of {len(pairs)} pairs"
    )
    return ratio


def in_turn(ours: Callable, bare: Callable, pairs: int) -> list[tuple[float, float]]:
    """Return pairs of what both sides return, each called first as often as the other."""
    found = []
    for number in range(pairs + 1):
        if number % 2 == 0:
            found.append((ours(), bare()))
        else:
            found.append((bare(), ours())[::-1])
    return found[1:]  # the first pair warms up


def in_ranks(function: Callable, args: Any, ranks: int = RANKS) -> list:
    """Return what function(args, barrier) returns in each of ranks, rank 0 first."""
    # fork: the ranks have torch imported, and nothing of an earlier measurement.
    context = multiprocessing.get_context("fork")
    barrier, port = context.Barrier(ranks, timeout=60), str(free_port())
    pipes = [context.Pipe(duplex=False) for _ in range(ranks)]

    def rank_main(rank: int) -> None:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
        os.environ.update(WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        torch.set_num_threads(1)
        torch.set_flush_denormal(True)
        pipes[rank][1].send(function(args, barrier))

    processes = [context.Process(target=rank_main, args=(rank,)) for rank in range(ranks)]
    for process in processes:
        process.start()
    for _, sender in pipes:
        sender.close()  # so that recv fails, and does not wait, for a rank that has died
    results = [receiver.recv() for receiver, _ in pipes]
    for process in processes:
        process.join()
    return results


def compare_speed(args: argparse.Namespace, barrier) -> list[tuple[float, float]]:
    """Return pairs of images/s, train_resnet's and the bare loop's, for one epoch each."""
    sizes = [f"--batch_size={args.batch_size}", f"--image_size={args.image_size}"]
    typed = train_resnet.parse(["--use_syn", "--epochs=1", *sizes])
    env = detect()
    logging.disable()  # no line for each epoch
    with process_group(env, "gloo") as device:
        return in_turn(
            lambda: train_resnet.train(typed, env, device)["images_per_s"],
            lambda: bare_loop(typed),
            args.pairs,
        )


def bare_loop(args: argparse.Namespace) -> float:
    """Return images/s of DDP as it is written without helpers: one epoch."""
    dataset = TensorDataset(
        torch.randn(IMAGES, 3, args.image_size, args.image_size), torch.randint(10, (IMAGES,))
    )
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, args.batch_size, sampler=sampler)
    model = DDP(get_model(args.arch, num_classes=10))
    optimizer = torch.optim.SGD(
        model.parameters(), args.lr, momentum=0.9, weight_decay=5e-4, nesterov=True, fused=True
    )
    sampler.set_epoch(0)
    model.train()
    dist.barrier()
    start = time.perf_counter()
    for images, labels in loader:
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.barrier()
    return IMAGES / (time.perf_counter() - start)


def through_process_group(args: argparse.Namespace, barrier) -> float:
    """Return the milliseconds from detect() to the end of the first all_reduce."""
    barrier.wait()
    start = time.perf_counter()
    with process_group(detect(), "gloo"):
        dist.all_reduce(torch.ones(1))
        return 1000 * (time.perf_counter() - start)


def through_init(args: argparse.Namespace, barrier) -> float:
    """Return the milliseconds from init_process_group to the end of the first all_reduce."""
    barrier.wait()
    start = time.perf_counter()
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    milliseconds = 1000 * (time.perf_counter() - start)
    dist.destroy_process_group()
    return milliseconds


if __name__ == "__main__":
    sys.exit(main())
