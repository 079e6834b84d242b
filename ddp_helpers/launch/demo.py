"""python -m ddp_helpers demo: the two scripts under every launcher, on this machine.

Rank 0 sends a number to three other ranks; then two ranks train a ResNet-18 on real handwritten
digits. The same parameters must come out under every launcher.
Lesson: notebooks/05_three_launchers.ipynb
"""

from __future__ import annotations

import argparse
import sys
import time

from ..results import ResultsError
from .mpi import LauncherNotFound, LauncherRefused
from .runner import JobFailed, launch_here

LAUNCHERS = ("torch.distributed.launch", "torchrun", "mpirun")
WANTED_ACCURACY = 0.95
WIDTHS = (26, 26, 34, 17)  # of all columns but the last


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--timeout", type=float, default=300.0, metavar="S", help="seconds for each job (300)"
    )


def main(args: argparse.Namespace) -> int:
    """Print a table with one row per launcher; return 1 when a job failed or parameters differ."""
    header = ("launcher", "message passing", "ResNet-18 on real digits", "test accuracy")
    for column, text in enumerate(header):
        _cell(column, text)
    print("parameters")
    trained = []
    for launcher in LAUNCHERS:
        try:
            trained.append(_row(launcher, args.timeout))
        except (JobFailed, ResultsError, LauncherNotFound, LauncherRefused) as error:
            print(f"\n{launcher}: {error}", file=sys.stderr)
            return 1
    hashes = {result["parameters"] for results in trained for result in results}
    lowest = min(result["accuracy"] for results in trained for result in results)
    equal, good = len(hashes) == 1, lowest >= WANTED_ACCURACY
    print(f"\nEqual parameters under all {len(LAUNCHERS)} launchers: {'yes' if equal else 'NO'}")
    print(f"Test accuracy at least {WANTED_ACCURACY:.0%}: {'yes' if good else 'NO'}")
    return 0 if equal and good else 1


def _row(launcher: str, timeout_s: float) -> list[dict]:
    """Run both scripts under launcher, print the row as it comes, return what was trained."""
    _cell(0, launcher)
    began = time.monotonic()
    results = launch_here(launcher, "ddp_helpers.scripts.message_passing", n=4, timeout_s=timeout_s)
    got = sum(result["number"] == 42.0 for result in results)
    _cell(1, f"{got} of 4 ranks, {time.monotonic() - began:.0f} s")
    began = time.monotonic()
    trained = launch_here(launcher, "ddp_helpers.scripts.train_resnet", n=2, timeout_s=timeout_s)
    first = trained[0]
    _cell(2, f"2 ranks, {first['images_per_s']:.0f} images/s, {time.monotonic() - began:.0f} s")
    _cell(3, f"{first['accuracy']:.1%}")
    print(first["parameters"][:12], flush=True)
    return trained


def _cell(column: int, text: str) -> None:
    print(f"{text:<{WIDTHS[column]}}", end="", flush=True)
