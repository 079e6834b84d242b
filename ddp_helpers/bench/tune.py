"""bench tune: train_resnet with one option more, side by side with the same without.

Every job is new, and the jobs of a round follow one another, so that a busy hour hits all of
them. Then the options that helped are tried together. Standard library only.
Lesson: notebooks/07_scaling.ipynb
"""

from __future__ import annotations

import argparse
import os
import shlex
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ddp_helpers.bench.record import read_record, write_record
from ddp_helpers.bench.text import table
from ddp_helpers.launch.cli import add_where, exit_status, hosts_of, run
from ddp_helpers.launch.commands import Job, threads
from ddp_helpers.launch.runner import JobFailed
from ddp_helpers.results import read_results

MODULE = "ddp_helpers.scripts.train_resnet"
HELPS = 1.02  # times the images/s without the option: less is noise
BEFORE = "as it is"


@dataclass(frozen=True)
class Option:
    """Words that are added to the command. exact: the same arithmetic, to the rounding of fp32."""

    words: str
    exact: bool


OPTIONS = (
    Option("--bucket_mb=5", exact=True),
    Option("--bucket_mb=100", exact=True),
    Option("--no_bucket_view", exact=True),
    Option("--static_graph", exact=True),
    Option("--channels_last", exact=True),
    Option("--compile", exact=True),
    Option("--threads=2", exact=True),
    Option("--workers=1", exact=True),
    Option("--accumulate=4", exact=False),
    Option("--amp=bf16", exact=False),
    Option("--compress=fp16", exact=False),
    Option("--compress=bf16", exact=False),
    Option("--compress=powersgd", exact=False),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `bench tune` to parser."""
    add_where(parser)
    parser.add_argument("--rounds", type=int, default=3, help="repeats of every job")
    parser.add_argument(
        "--only", metavar="OPTIONS", help="try these alone, such as compile,amp=bf16"
    )
    parser.add_argument("--out", metavar="FILE", help="write the figures; continue what is there")
    parser.add_argument("training", nargs="*", metavar="OPTION", help="of train_resnet, behind --")


def main(args: argparse.Namespace) -> int:
    """Print a table and the best commands; return 0, 1 (the job fails as it is) or 2."""
    return exit_status(lambda: _tune(args))


def _tune(args: argparse.Namespace) -> None:
    words = [option.words for option in OPTIONS]
    if args.only:
        words = [f"--{one.lstrip('-')}" for one in args.only.split(",")]
    settings = {"training": args.training, "hosts": str(hosts_of(args)), "launcher": args.launcher}
    record = read_record(args.out, settings)
    runs = record.setdefault("runs", {})  # words -> one entry for each round
    _rounds(args, record, words)
    together = {
        "exact": best_of(runs, [word for word in words if _is_exact(word)]),
        "all": best_of(runs, words),
    }
    _rounds(args, record, [" ".join(found) for found in together.values() if len(found) > 1])
    print(_text(args, runs))


def _is_exact(words: str) -> bool:
    known = {option.words: option.exact for option in OPTIONS}
    return all(known.get(word, False) for word in words.split())


def _rounds(args: argparse.Namespace, record: dict[str, Any], words: Sequence[str]) -> None:
    """Run what is missing of args.rounds rounds of the command as it is, and with each of words."""
    runs = record["runs"]
    for number in range(args.rounds):
        if all(len(runs.get(one, [])) > number for one in words):
            continue
        # The command as it is again, beside those that are compared with it.
        before = _run(args, "")
        for one in words:
            if len(runs.get(one, [])) > number:
                continue
            found = _run(args, one) if not _has_failed(runs, one) else runs[one][0]
            if "error" not in found:
                found |= {"ratio": found["images_per_s"] / before["images_per_s"]}
            runs.setdefault(one, []).append(found)
            write_record(args.out, record)
            said = f"{found['ratio']:.2f}" if "ratio" in found else found["error"]
            print(
                f"round {number + 1} of {args.rounds}   {one}: {said}", file=sys.stderr, flush=True
            )
        runs.setdefault(BEFORE, []).append(before | {"ratio": 1.0})
        write_record(args.out, record)


def _has_failed(runs: dict[str, Any], words: str) -> bool:
    return "error" in runs.get(words, [{}])[0]


def _run(args: argparse.Namespace, words: str) -> dict[str, Any]:
    """Return the figures of one job; with words, one that fails has an error in their place."""
    with tempfile.TemporaryDirectory(prefix="ddp_helpers_tune_") as folder:
        typed = (*args.training, *words.split(), "--result_dir", folder, "--gather_results")
        job = Job(MODULE, ("--use_syn", *typed), True, hosts_of(args), env=threads(os.environ))
        try:
            run(args.launcher, job, echo=False)
        except JobFailed as failed:
            if not words:
                raise
            return {"error": str(failed).splitlines()[1].strip()}
        results = read_results(folder)
    figures = {name: results[0][name] for name in ("images_per_s", "loss", "accuracy")}
    return figures | {"memory_mb": max(one["memory_mb"] for one in results)}


def best_of(runs: dict[str, Any], words: Sequence[str]) -> list[str]:
    """Return those of words that help, the best where several set the same option."""
    best: dict[str, str] = {}
    for one in words:
        name = one.partition("=")[0]
        if ratio(runs, one) > HELPS and ratio(runs, one) > ratio(runs, best.get(name, "")):
            best[name] = one
    return list(best.values())


def ratio(runs: dict[str, Any], words: str) -> float:
    """Return the median of images/s with words, of those without in the same round; else 0."""
    ratios = [one["ratio"] for one in runs.get(words, []) if "ratio" in one]
    return statistics.median(ratios) if ratios else 0.0


def _text(args: argparse.Namespace, runs: dict[str, Any]) -> str:
    rows = []
    for words in sorted(runs, key=lambda words: -ratio(runs, words)):
        found = runs[words]
        if _has_failed(runs, words):
            rows.append([words, "-", "-", "-", "-", found[0]["error"][:60]])
            continue
        ratios = [one["ratio"] for one in found]
        middle = {
            name: statistics.median(one[name] for one in found)
            for name in ("memory_mb", "loss", "accuracy")
        }
        rows.append(
            [
                words,
                f"{ratio(runs, words):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
                f"{middle['memory_mb']:.0f}",
                f"{middle['loss']:.4f}",
                f"{middle['accuracy']:.4f}",
                "" if words == BEFORE or _is_exact(words) else "other arithmetic",
            ]
        )
    head = ["option", "images/s of before", "MB", "loss", "accuracy", ""]
    exact = [words for words in runs if words != BEFORE and _is_exact(words)]
    others = [words for words in runs if words != BEFORE]
    lines = [
        table(head, rows),
        "",
        f"fastest with the same arithmetic: {_command(args, runs, exact)}",
    ]
    lines.append(f"fastest of all: {_command(args, runs, others)}")
    return "\n".join(lines)


def _command(args: argparse.Namespace, runs: dict[str, Any], words: Sequence[str]) -> str:
    best = max(words, key=lambda one: ratio(runs, one), default="")
    if ratio(runs, best) <= HELPS:
        best = ""
    where = ["-n", str(args.n)] if args.n else ["--hosts", args.hosts] if args.hosts else []
    if args.hostfile:
        where = ["--hostfile", args.hostfile]
    typed = ["--launcher", args.launcher, *where, "--run", "-m", MODULE, *args.training]
    return f"python -m ddp_helpers launch {shlex.join([*typed, *best.split()])}"
