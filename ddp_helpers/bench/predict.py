"""bench predict: a cost model of a step, from what bench train measured or from typed numbers.

    bench predict here.json --rate 1gbit --ranks 1,2,4,64
    bench predict --images 32 --forward 60ms --backward 120ms --gradients 100mb \\
        --rate 25gbit --latency 20us --ranks 1,8,256

Standard library only. Lesson: notebooks/07_scaling.ipynb
"""

from __future__ import annotations

import argparse
import re
from dataclasses import replace

from ddp_helpers.bench import text
from ddp_helpers.bench.cost_model import (
    Link,
    Work,
    accumulated,
    compressed,
    curve,
    even_buckets,
    last_that_pays,
    rate_to_hide,
)
from ddp_helpers.bench.record import RecordError, load_record

_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
_BITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_BYTES = {"kb": 1e3, "mb": 1e6, "gb": 1e9}
_COUNTS = tuple(1 << power for power in range(13))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `bench predict` to parser."""
    parser.add_argument("file", nargs="?", help="what bench train --out has written")
    parser.add_argument("--images", type=int, help="of one rank in a step")
    parser.add_argument("--forward", type=_unit(_SECONDS), help="such as 60ms")
    parser.add_argument("--backward", type=_unit(_SECONDS), help="such as 120ms")
    parser.add_argument("--other", type=_unit(_SECONDS), help="data and optimizer (default: 0ms)")
    parser.add_argument("--gradients", type=_unit(_BYTES), help="of one rank, such as 100mb")
    parser.add_argument("--rate", type=_unit(_BITS), help="of a link between nodes, such as 10gbit")
    parser.add_argument("--latency", type=_unit(_SECONDS), help="of a message, such as 20us")
    parser.add_argument("--ranks", type=rank_counts, default=list(_COUNTS), help="such as 1,8,256")
    parser.add_argument(
        "--ranks_per_node",
        "--ranks-per-node",
        type=int,
        metavar="N",
        help="up to N ranks the measured link holds, and --rate above",
    )
    parser.add_argument("--strong", action="store_true", help="the images are shared by all ranks")
    parser.add_argument("--accumulate", type=int, default=1, help="batches per exchange")
    parser.add_argument("--compress", type=float, default=1.0, help="2: half the bytes are sent")


def main(args: argparse.Namespace) -> int:
    """Print the predicted curve; return 0. Raises RecordError when numbers are missing."""
    work, link = _measured(args) if args.file else _typed(args)
    work = compressed(accumulated(work, args.accumulate), args.compress)
    between = link
    if args.rate:
        between = link.at_most(args.rate / 8)
    if args.latency is not None:
        between = replace(between, latency_s=args.latency)

    def link_of(ranks: int) -> Link:
        return link if args.ranks_per_node and ranks <= args.ranks_per_node else between

    print(text.prediction(curve(work, link_of, args.ranks, args.strong)))
    print(text.paying(last_that_pays(work, link_of, args.strong)))
    most = args.ranks[-1]
    if most > 1 and not args.strong:
        gigabits = 8 * rate_to_hide(work, most) / 1e9
        print(f"the backward of {most} ranks can hide the exchange from {gigabits:.3g} Gbit/s on")
    return 0


def _measured(args: argparse.Namespace) -> tuple[Work, Link]:
    record = load_record(args.file)
    if "link" not in record:
        raise RecordError(
            f"{args.file} holds no link: it is of one rank, or the bench has not ended.\n"
            f"Finish it: bench train --ranks 1,2 --out {args.file}"
        )
    if typed := [name for name in _WORK if getattr(args, name) is not None]:
        raise RecordError(f"--{typed[0]} is in {args.file} already: leave one of them out.")
    return text.work_of(record), Link(**record["link"])


_WORK = ("images", "forward", "backward", "gradients")


def _typed(args: argparse.Namespace) -> tuple[Work, Link]:
    needed = (*_WORK, "rate")
    if missing := [f"--{name}" for name in needed if getattr(args, name) is None]:
        raise RecordError(
            f"{', '.join(missing)} missing.\n"
            "Give a file of bench train --out, or all of"
            f" {', '.join(f'--{name}' for name in needed)}."
        )
    buckets = even_buckets(args.gradients)
    work = Work(args.images, args.forward, args.backward, args.other or 0.0, buckets)
    return work, Link(args.latency or 0.0, args.rate / 8)


def _unit(units: dict[str, float]):
    def value(word: str) -> float:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([a-z]+)", word.lower())
        if not match or match[2] not in units:
            known = ", ".join(units)
            raise argparse.ArgumentTypeError(f"{word!r}, expected a number and one of {known}")
        return float(match[1]) * units[match[2]]

    return value


def rank_counts(words: str) -> list[int]:
    """Return the numbers of ranks that an option such as 1,8,256 names, rising."""
    counts = [int(word) if word.isdecimal() else 0 for word in words.split(",")]
    if not all(0 < count <= 1 << 20 for count in counts):
        raise argparse.ArgumentTypeError(f"{words!r}, expected numbers of ranks such as 1,8,256")
    return sorted(set(counts))
