"""What the scaling lab claims, measured side by side: python benchmarks/scaling.py [PART ...]

speed     train_resnet beside a DDP loop written by hand, with random labels and torch's defaults
          (goal: 1.05 times its images/s on 1 and on 2 ranks), beside the same with constant labels,
          and with --amp bf16 --channels_last (goal on a processor with amx_bf16: 1.2 times fp32)
pair      efficiency of two ranks, median of five rounds (goal: 0.90)
links     predicted beside measured steps: two practice nodes, four link rates, ResNet-18 and -50
          (goal: within 15 %, three quarters of them within 10 %)
compress  the 200 Mbit/s link with compressed gradients (goal: fp16 1.7 times, PowerSGD 3.5 times
          the images/s, and accuracy on digits within one point)
bench     the all-reduce bench beside a bare loop (goal: within 5 %), and the bench's own cost in
          a step (goal: under 1 %)

On this machine's CPU, ranks of one thread, gloo. links and compress need root: they make two nodes.
Exits with status 1 when a goal is missed. Without PART all of them: some 15 minutes.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from overhead import IMAGES, in_ranks, in_turn, report
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torchvision.models import get_model

from ddp_helpers.bench import collectives, text
from ddp_helpers.bench.replica_runner import Runner
from ddp_helpers.launch.practice_cluster import practice_cluster
from ddp_helpers.launch.runner import launch_here
from ddp_helpers.scripts import train_resnet
from ddp_helpers.worker.environment import detect
from ddp_helpers.worker.process_group import process_group

RATES = (None, "1gbit", "500mbit", "200mbit")
PAIRS = 7


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], metavar="PART")
    chosen = parser.parse_args().parts or PARTS
    logging.disable()  # no line for each epoch
    os.environ["OMP_NUM_THREADS"] = "1"
    missed = [goal for name in chosen for goal, met in PARTS[name]() if not met]
    print("\n".join(f"missed: {goal}" for goal in missed) or "all goals met")
    return int(bool(missed))


def speed() -> list[tuple[str, bool]]:
    goals = []
    for ranks in (1, 2):
        pairs = in_ranks(beside_by_hand, None, ranks)[0]
        ratio = report(f"images/s, {ranks} rank(s)", "train_resnet", "by hand", pairs["default"])
        goals.append((f"1.05 times the loop by hand on {ranks} rank(s)", ratio >= 1.05))
        report(f"images/s, {ranks} rank(s)", "train_resnet", "constant labels", pairs["constant"])
        ratio = report(f"images/s, {ranks} rank(s)", "bf16", "fp32", pairs["bf16"])
        goals.append((f"1.2 times fp32 with bf16 on {ranks} rank(s)", ratio >= 1.2 or not amx()))
    return goals


def amx() -> bool:
    """Return True where the processor multiplies bf16 matrices in hardware."""
    try:
        return "amx_bf16" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


def beside_by_hand(_, barrier) -> dict[str, list[tuple[float, float]]]:
    def trained(*words: str) -> float:
        torch.set_flush_denormal(True)  # as main() of the script does
        typed = train_resnet.parse(["--use_syn", "--epochs=1", *SIZES, *words])
        return train_resnet.train(typed, env, device)["images_per_s"]

    env = detect()
    with process_group(env, "gloo") as device:
        bf16 = ("--amp=bf16", "--channels_last")
        return {
            "default": in_turn(trained, by_hand, PAIRS),
            "constant": in_turn(trained, lambda: by_hand(constant=True), 2),
            "bf16": in_turn(lambda: trained(*bf16), trained, PAIRS),
        }


SIZES = ("--image_size=64", "--batch_size=16")


def by_hand(constant: bool = False) -> float:
    """Return images/s of DDP as a first script has it; constant: every image has label 0."""
    torch.set_flush_denormal(False)
    labels = torch.zeros(IMAGES, dtype=torch.long) if constant else torch.randint(10, (IMAGES,))
    dataset = TensorDataset(torch.randn(IMAGES, 3, 64, 64), labels)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=16, sampler=sampler)
    model = DDP(get_model("resnet18", num_classes=10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=5e-4)
    # Constant labels are learned at once: it takes some epochs until gradients are next to 0.
    for epoch in range(3 if constant else 1):
        sampler.set_epoch(epoch)
        dist.barrier()
        began = time.perf_counter()
        for images, targets in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(images), targets).backward()
            optimizer.step()
        dist.barrier()
    return IMAGES / (time.perf_counter() - began)


def pair() -> list[tuple[str, bool]]:
    record = bench_train("--image_size", "64", "--batch_size", "64")
    shares = text.efficiencies(record, 2)
    middle = statistics.median(shares)
    print(text.train(record).partition("\n\n")[0])
    return [(f"efficiency 0.90 of two ranks: {middle:.3f}", middle >= 0.90)]


def bench_train(*words: str, where: tuple[str, ...] = ("-n", "2")) -> dict:
    """Return the record of bench train on two ranks."""
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/run.json"
        argv = [sys.executable, "-m", "ddp_helpers", "bench", "train", *where, "--out", out]
        done = subprocess.run(
            [*argv, "--ranks", "1,2", "--", *words], capture_output=True, text=True, check=False
        )
        if done.returncode:
            sys.exit(done.stdout + done.stderr)
        return json.loads(Path(out).read_text())


def links() -> list[tuple[str, bool]]:
    errors, rows = [], []
    for arch in ("resnet18", "resnet50"):
        for rate in RATES:
            record = on_nodes(rate, "--arch", arch, "--image_size", "64", "--batch_size", "16")
            measured, predicted = text.step_s(record, 2), text.predicted_s(record, 2)
            errors.append(abs(predicted / measured - 1))
            share = statistics.median(text.efficiencies(record, 2))
            rows.append(
                [
                    f"{arch}, {rate or 'no limit'}",
                    f"{1000 * measured:.0f} ms",
                    f"{1000 * predicted:.0f} ms",
                    f"{predicted / measured - 1:+.1%}",
                    f"{share:.2f}",
                ]
            )
            print(*rows[-1], flush=True)
    print(text.table(["", "measured step", "predicted", "", "efficiency"], rows))
    near = sum(error <= 0.10 for error in errors)
    return [
        (f"predictions within 15 %: the worst is {max(errors):.1%}", max(errors) <= 0.15),
        (f"three quarters within 10 %: {near} of {len(errors)}", near >= 0.75 * len(errors)),
    ]


def on_nodes(rate: str | None, *words: str) -> dict:
    with practice_cluster(rate=rate) as cluster:
        os.environ["PATH"] = cluster.environ()["PATH"]  # ssh to its nodes
        where = ",".join(f"{host.name}:1" for host in cluster.hosts(1))
        return bench_train(*words, where=("--hosts", where))


def compress() -> list[tuple[str, bool]]:
    names = (None, "fp16", "bf16", "powersgd")
    speeds, accuracies = {}, {}
    for name in names:
        words = ("--compress", name) if name else ()
        record = on_nodes("200mbit", "--image_size", "32", "--batch_size", "32", *words)
        speeds[name] = statistics.median(text.speeds(record, 2))
        [first, _] = launch_here("torchrun", train_resnet.__name__, *words, timeout_s=600)
        accuracies[name] = first["accuracy"]
        print(
            f"{name or 'as it is'}: {speeds[name]:.1f} images/s on 200 Mbit/s, ratio"
            f" {speeds[name] / speeds[None]:.2f}; accuracy on digits {accuracies[name]:.4f}",
            flush=True,
        )
    worst = min(accuracies[name] - accuracies[None] for name in names)
    return [
        ("fp16 1.7 times on 200 Mbit/s", speeds["fp16"] >= 1.7 * speeds[None]),
        ("PowerSGD 3.5 times on 200 Mbit/s", speeds["powersgd"] >= 3.5 * speeds[None]),
        (f"accuracy within a point: {100 * worst:+.2f}", worst >= -0.01),
    ]


def bench() -> list[tuple[str, bool]]:
    found = in_ranks(bench_beside_bare, None)[0]
    goals = []
    for size, pairs in found["all_reduce"].items():
        ratio = report(f"us of an all-reduce of {size} bytes", "bench", "bare loop", pairs)
        goals.append((f"all-reduce of {size} bytes within 5 %", abs(ratio - 1) <= 0.05))
    ratio = report("ms of a step", "bench", "bare loop", found["step"])
    return [*goals, (f"a step of the bench within 1 %: {ratio - 1:+.2%}", ratio <= 1.01)]


def bench_beside_bare(_, barrier) -> dict:
    env = detect()
    with process_group(env, "gloo") as device:
        sizes = {size: torch.ones(size // 4) for size in (1 << 16, 1 << 20, 1 << 24)}
        reduced = {
            size: in_turn(
                lambda size=size: 1e6 * collectives.all_reduce_timing(size, device).seconds,
                lambda tensor=tensor: bare_all_reduce(tensor),
                PAIRS,
            )
            for size, tensor in sizes.items()
        }
        args = train_resnet.parse(["--use_syn", *SIZES])
        runner = Runner(args, env, env.world_size, device, None)
        return {
            "all_reduce": reduced,
            "step": in_turn(lambda: bench_steps(runner), lambda: bare_steps(runner), 4 * PAIRS),
        }


def bare_all_reduce(tensor: torch.Tensor) -> float:
    """Return microseconds of dist.all_reduce in a loop of about a second."""
    calls = max(5, round(4e8 / tensor.nbytes)) if tensor.nbytes > 1 << 18 else 2000
    dist.barrier()
    began = time.perf_counter()
    for _ in range(calls):
        dist.all_reduce(tensor)
    return 1e6 * (time.perf_counter() - began) / calls


def bench_steps(runner: Runner, steps: int = 4) -> float:
    from ddp_helpers.bench.in_ranks import timed

    return 1000 * timed(runner, steps, None, runner.device)["step_s"]


def bare_steps(runner: Runner, steps: int = 4) -> float:
    """Return milliseconds of a step of the same replica, written as one loop."""
    batches = runner.batches
    dist.barrier()
    began = time.perf_counter()
    for _ in range(steps):
        images, labels = next(batches)
        loss = F.cross_entropy(runner.model(images), labels)
        loss.backward()
        runner.optimizer.step()
        runner.optimizer.zero_grad()
    return 1000 * (time.perf_counter() - began) / steps


PARTS = {"speed": speed, "pair": pair, "links": links, "compress": compress, "bench": bench}

if __name__ == "__main__":
    sys.exit(main())
