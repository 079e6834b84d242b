"""python -m ddp_helpers bench: train, allreduce, predict, tune.

    python -m ddp_helpers bench train --ranks 1,2 --out here.json -- --arch resnet18
    python -m ddp_helpers bench predict here.json --rate 1gbit --ranks 1,8,64
    python -m ddp_helpers bench allreduce --hosts node-a:1,node-b:1
    python -m ddp_helpers bench tune -- --arch resnet18 --batch_size 32

Alone, train and allreduce start their ranks; under a launcher they are the ranks.
Lesson: notebooks/07_scaling.ipynb
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

from ddp_helpers.bench import predict, text, tune
from ddp_helpers.bench.record import RecordError, write_record
from ddp_helpers.launch.cli import add_where, exit_status, hosts_of, run
from ddp_helpers.launch.commands import Job, threads
from ddp_helpers.worker.environment import LaunchEnvironment, LaunchEnvironmentError, detect

_EXAMPLES = """\
examples:
  bench train --ranks 1,2                                  images/s of 1 and 2 ranks here
  bench train --hosts node-a:4,node-b:4 --out run.json     1, 2, 4 and 8 ranks there
  bench predict run.json --rate 10gbit --ranks 8,64,512    the same on another network
  bench allreduce --launcher mpirun                        torch's all-reduce, and MPI's own
  bench tune -- --arch resnet50 --batch_size 64            each option's effect, the best command
"""
_TRAINING = "options of train_resnet, behind --"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the commands of `bench` to parser."""
    parser.epilog = _EXAMPLES
    parser.allow_abbrev = False
    commands = parser.add_subparsers(metavar="WHAT", required=True, dest="what")

    def add(name: str, help: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=help, description=f"{help.capitalize()}.")
        made.allow_abbrev = False
        return made

    one = add("train", "images/s of train_resnet on some ranks, and where a step's time goes")
    add_where(one)
    counts = "such as 1,2,4 (default: powers of 2, and all)"
    one.add_argument("--ranks", type=predict.rank_counts, help=counts)
    one.add_argument("--strong", action="store_true", help="--batch_size is shared by all ranks")
    one.add_argument("--rounds", type=_at_least(5), default=5, help="repeats, 5 or more")
    one.add_argument("--seconds", type=float, default=1.0, help="of one measurement")
    one.add_argument("--trace", metavar="DIR", help="write what a step does, for Perfetto")
    _add_output(one)
    one.add_argument("training", nargs="*", metavar="OPTION", help=_TRAINING)

    one = add("allreduce", "time and bandwidth of all-reduces, of messages, and of plain TCP")
    add_where(one)
    one.add_argument("--sizes", type=_sizes, default=_sizes("4k,64k,1m,4m,16m,64m"), help="bytes")
    one.add_argument("--backend", choices=("auto", "gloo", "nccl"), default="auto")
    _add_output(one)

    predict.add_arguments(add("predict", "images/s on any number of ranks, without them"))
    tune.add_arguments(
        add("tune", "the effect of each option of train_resnet, and the best command")
    )


def main(args: argparse.Namespace) -> int:
    """Return 0, 1 (the job failed) or 2 (wrong use)."""
    try:
        if args.what == "predict":
            return predict.main(args)
        env = detect()
        if args.what == "tune":
            return tune.main(args)
        if env.launcher == "python":
            return _alone(args)
        return _in_rank(args, env)
    except (RecordError, LaunchEnvironmentError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _alone(args: argparse.Namespace) -> int:
    """Start the ranks, which run this same command."""

    def work() -> None:
        job = Job("ddp_helpers", _again(args), True, hosts_of(args), env=threads(os.environ))
        run(args.launcher, job)

    return exit_status(work)


def _again(args: argparse.Namespace) -> tuple[str, ...]:
    """Return the words that give every rank the same options."""
    words = ["bench", args.what]
    if args.out:
        words += ["--out", args.out]
    if args.json:
        words.append("--json")
    if args.what == "allreduce":
        sizes = ",".join(map(str, args.sizes))
        return (*words, "--sizes", sizes, "--backend", args.backend)
    if args.ranks:
        words += ["--ranks", ",".join(map(str, args.ranks))]
    words += ["--rounds", str(args.rounds), "--seconds", str(args.seconds)]
    if args.strong:
        words.append("--strong")
    if args.trace:
        words += ["--trace", args.trace]
    return (*words, "--", *args.training)


def _in_rank(args: argparse.Namespace, env: LaunchEnvironment) -> int:
    import torch

    from ddp_helpers.bench import in_ranks
    from ddp_helpers.scripts import train_resnet
    from ddp_helpers.worker.console import short_errors
    from ddp_helpers.worker.process_group import process_group
    from ddp_helpers.worker.replica import set_threads
    from ddp_helpers.worker.watchdog import watchdog

    torch.set_flush_denormal(True)  # as train_resnet does

    def say(line: str) -> None:
        if env.rank == 0:
            print(line, file=sys.stderr, flush=True)

    def tell(record: dict[str, Any], words: str) -> None:
        if env.rank == 0:
            write_record(args.out, record)
            print(json.dumps(record, indent=1) if args.json else words, flush=True)

    with short_errors(*train_resnet.ERRORS, RecordError):
        if args.what == "allreduce":
            with process_group(env, args.backend) as device, watchdog(env.rank, env.world_size):
                record = in_ranks.all_reduce(args, env, device, say)
            tell(record, text.all_reduce(record))
            return 0
        training = train_resnet.parse(["--use_syn", *args.training])
        args.ranks = _ranks(args, env, training.batch_size)
        set_threads(env.local_world_size, training.threads)
        group = process_group(env, training.backend, training.timeout)
        with group as device, watchdog(env.rank, env.world_size):
            record = in_ranks.train(args, training, env, device, say)
        tell(record, text.train(record))
    return 0


def _ranks(args: argparse.Namespace, env: LaunchEnvironment, batch: int) -> list[int]:
    """Return the numbers of ranks to measure, rising. Raises RecordError for what cannot be."""
    n = env.world_size
    ranks = args.ranks or sorted({n, *(1 << power for power in range(n.bit_length() - 1)), 1})
    if ranks[-1] > n:
        raise RecordError(
            f"--ranks {ranks[-1]}, but the job has {n}.\n"
            f"Start more: -n {ranks[-1]} on this machine, or more --hosts."
        )
    if args.strong and (odd := [one for one in ranks if batch % one]):
        raise RecordError(
            f"--strong: {odd[0]} ranks cannot share a batch of {batch} equally.\n"
            f"Give a --batch_size that {odd[0]} divides, behind --."
        )
    return ranks


def _add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", metavar="FILE", help="write the figures; continue what is there")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")


def _sizes(words: str) -> list[int]:
    sizes = []
    for word in words.lower().split(","):
        number, unit = (word[:-1], word[-1]) if word[-1:] in ("k", "m") else (word, "")
        size = int(number) << {"": 0, "k": 10, "m": 20}[unit] if number.isdecimal() else 0
        if size < 4 or size % 4:
            raise argparse.ArgumentTypeError(f"{word!r}, expected bytes such as 4k or 16m")
        sizes.append(size)
    return sorted(set(sizes))


def _at_least(least: int):
    def number(word: str) -> int:
        if not word.isdecimal() or int(word) < least:
            raise argparse.ArgumentTypeError(f"{word!r}, expected a whole number, {least} or more")
        return int(word)

    return number
