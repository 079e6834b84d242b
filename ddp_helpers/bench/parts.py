"""Where a step's time goes: data, forward, backward, optimizer, and the wait for gradients.

The same steps are timed in three ways that take turns: with the exchange of gradients, with a
hook that exchanges nothing (so that each bucket's time is when it would be ready), and under
no_sync. What the exchange adds to the backward is exposed: the step waits for it.
Source: torch.nn.parallel.DistributedDataParallel.register_comm_hook.
Lesson: notebooks/07_scaling.ipynb
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from ddp_helpers.bench.cost_model import Bucket, Work
from ddp_helpers.bench.replica_runner import Clock, Runner
from ddp_helpers.worker.environment import LaunchEnvironment
from ddp_helpers.worker.replica import compress_gradients

MODES = ("exchange", "ready", "no_sync")
PHASES = ("data", "forward", "backward", "optimizer")
STEPS = 4  # of each mode in a row, of which the first is not counted
SMALLER = {"fp16": 2, "bf16": 2}  # what --compress sends: bytes / this


class Recorder:
    """A communication hook that notes when each bucket is ready, and when its exchange has ended.

    On a GPU these are the times at which Python asked; a trace shows the device's.
    """

    def __init__(self, compress: str | None):
        self._inner = compress_gradients(compress) if compress else (None, allreduce_hook)
        self.exchange = True
        self.begin = 0.0
        self.buckets: dict[int, list[float]] = {}  # number -> bytes, ready, end

    def hook(self, _, bucket):
        """Exchange bucket as the job would, or not at all; return the future of its tensor.

        Without annotations: DDP compares them with its own classes, and here they are text.
        """
        tensor, number = bucket.buffer(), bucket.index()
        ready = time.perf_counter() - self.begin
        self.buckets[number] = [tensor.numel() * tensor.element_size(), ready, ready]
        if not self.exchange:
            future: torch.futures.Future = torch.futures.Future()
            future.set_result(tensor)
            return future
        state, inner = self._inner

        def ended(future: torch.futures.Future) -> torch.Tensor:
            self.buckets[number][2] = time.perf_counter() - self.begin
            return future.value()

        return inner(state, bucket).then(ended)


def measure(
    args: argparse.Namespace, env: LaunchEnvironment, device: torch.device, rounds: int = 3
) -> dict[str, Any]:
    """Return the parts of a step of all ranks, and the Work to predict with; each must call it.

    Seconds are medians over the steps of the slowest rank.
    """
    plain = argparse.Namespace(**{**vars(args), "compress": None})
    runner = Runner(plain, env, env.world_size, device, None)
    recorder = Recorder(args.compress)
    runner.model.register_comm_hook(None, recorder.hook)
    for _ in range(3):  # DDP decides on its buckets after the first backward
        runner.step()
    seen: dict[str, list] = {mode: [] for mode in MODES}
    for _ in range(rounds):
        for mode in MODES:
            recorder.exchange = mode == "exchange"
            steps = [_step(runner, recorder, mode) for _ in range(STEPS)]
            seen[mode] += steps[1:]
    of_ranks: list = [None] * env.world_size
    dist.all_gather_object(of_ranks, seen)
    phases = {
        mode: {phase: _slowest([of[mode] for of in of_ranks], phase) for phase in PHASES}
        for mode in MODES
    }
    buckets = _buckets(of_ranks, SMALLER.get(args.compress, 1))
    work = _work(runner, phases, buckets)
    return {"ranks": env.world_size, "phases": phases, "buckets": buckets, "work": asdict(work)}


def _step(runner: Runner, recorder: Recorder, mode: str) -> dict[str, Any]:
    clock = Clock(runner.device)
    recorder.buckets = {}

    def mark(what: str) -> None:
        recorder.begin = clock.mark(what)

    runner.step(mark, exchange=mode != "no_sync")
    return {**clock.seconds, "buckets": recorder.buckets}


def _slowest(steps_of_ranks: list, phase: str) -> float:
    """Return the median over the steps of the seconds of the rank that took longest in each."""
    return statistics.median(
        max(step[phase] for step in steps) for steps in zip(*steps_of_ranks, strict=True)
    )


def _buckets(of_ranks: list, smaller: int) -> list[dict[str, float]]:
    """Return for each bucket its bytes as sent, and when it was ready, began and ended. Seconds."""

    def middle(mode: str, number: int, column: int) -> float:
        return statistics.median(
            max(step["buckets"][number][column] for step in steps)
            for steps in zip(*(of[mode] for of in of_ranks), strict=True)
        )

    found = []
    for number in sorted(of_ranks[0]["ready"][0]["buckets"]):
        found.append(
            {
                "bytes": of_ranks[0]["ready"][0]["buckets"][number][0] / smaller,
                "ready_s": middle("ready", number, 1),
                "begin_s": middle("exchange", number, 1),
                "end_s": middle("exchange", number, 2),
            }
        )
    return found


def _work(runner: Runner, phases: dict, buckets: list[dict[str, float]]) -> Work:
    batches = runner.args.accumulate
    backward_s = phases["ready"]["backward"]
    last_s = backward_s / batches  # of the batch whose gradients are exchanged
    ready = [min(max(one["ready_s"] / last_s, 0.0), 1.0) for one in buckets]
    return Work(
        images=batches * runner.args.batch_size,
        forward_s=phases["no_sync"]["forward"] + backward_s - last_s,
        backward_s=last_s,
        other_s=phases["no_sync"]["data"] + phases["no_sync"]["optimizer"],
        buckets=tuple(Bucket(one["bytes"], part) for one, part in zip(buckets, ready, strict=True)),
        broadcast_bytes=sum(
            buffer.numel() * buffer.element_size() for buffer in runner.model.module.buffers()
        ),
    )


def write_trace(
    args: argparse.Namespace, env: LaunchEnvironment, device: torch.device, folder: str
) -> Path:
    """Write what three steps do, for https://ui.perfetto.dev, to folder/rank_R.json."""
    from torch.profiler import ProfilerActivity, profile

    runner = Runner(args, env, env.world_size, device, None)
    for _ in range(3):
        runner.step()
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiler:
        for _ in range(3):
            runner.step()
    path = Path(folder) / f"rank_{env.rank}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(path))
    return path
