"""The tables that bench prints. Standard library only."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from ddp_helpers.bench.cost_model import (
    MIB,
    Bucket,
    Link,
    Point,
    Work,
    last_that_pays,
    shared,
    simulate,
)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return rows under head in columns; the first to the left, the others to the right."""
    lines = [head, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def work_of(record: dict[str, Any]) -> Work:
    """Return one rank's step as bench train has measured it; strong scaling: with all images."""
    fields = dict(record["parts"]["work"])
    buckets = tuple(Bucket(**bucket) for bucket in fields.pop("buckets"))
    work = Work(buckets=buckets, **fields)
    return shared(work, 1 / record["parts"]["ranks"]) if record["settings"]["strong"] else work


def train(record: dict[str, Any]) -> str:
    """Return the tables of a record of bench train."""
    parts = [_speeds(record)]
    if "parts" in record:
        parts += [_phases(record), _buckets(record), _link(record)]
    return "\n\n".join(parts)


def speeds(record: dict[str, Any], ranks: int) -> list[float]:
    """Return each round's images/s with so many ranks."""
    return [one[str(ranks)]["images_per_s"] for one in record["rounds"]]


def efficiencies(record: dict[str, Any], ranks: int) -> list[float]:
    """Return each round's images/s per rank, of those of the fewest ranks in the same round."""
    base = record["settings"]["ranks"][0]
    pairs = zip(speeds(record, ranks), speeds(record, base), strict=True)
    return [fast / ranks / (slow / base) for fast, slow in pairs]


def step_s(record: dict[str, Any], ranks: int) -> float:
    """Return the median over the rounds of the seconds of a step."""
    return statistics.median(one[str(ranks)]["step_s"] for one in record["rounds"])


def predicted_s(record: dict[str, Any], ranks: int) -> float:
    """Return the seconds of a step that the cost model gives for what bench train has measured."""
    work = work_of(record)
    if record["settings"]["strong"]:
        work = shared(work, ranks)
    return simulate(work, ranks, Link(**record["link"])).seconds


def _speeds(record: dict[str, Any]) -> str:
    settings = record["settings"]
    predictable = "parts" in record
    rows = []
    for ranks in settings["ranks"]:
        found, shares = speeds(record, ranks), efficiencies(record, ranks)
        seconds = step_s(record, ranks)
        row = [f"{ranks}", _spread(found, ".1f"), _spread(shares, ".3f")]
        row.append(f"{1000 * seconds:.0f} ms")
        if predictable:
            told = predicted_s(record, ranks)
            row.append("-" if ranks == 1 else f"{1000 * told:.0f} ms ({told / seconds - 1:+.1%})")
        rows.append(row)
    head = ["ranks", "images/s", "efficiency", "step", *(["predicted"] if predictable else [])]
    batch = settings["batch_size"]
    scaling = f"weak scaling, {batch} images a rank"
    if settings["strong"]:
        scaling = f"strong scaling, {batch} images in all"
    return (
        f"{settings['arch']}, {settings['image_size']}x{settings['image_size']},"
        f" {scaling}; median (least to most) of {len(record['rounds'])} rounds\n"
        + table(head, rows)
    )


def _spread(values: Sequence[float], how: str) -> str:
    middle = statistics.median(values)
    return f"{middle:{how}} ({min(values):{how}} to {max(values):{how}})"


def _phases(record: dict[str, Any]) -> str:
    phases = record["parts"]["phases"]
    names = {"exchange": "with exchange", "ready": "without", "no_sync": "no_sync"}
    rows = []
    for mode, name in names.items():
        times = list(phases[mode].values())
        rows.append([name, *(f"{1000 * one:.1f}" for one in (*times, sum(times)))])
    head = ["ms of a step", *phases["exchange"], "sum"]
    exposed = phases["exchange"]["backward"] - phases["ready"]["backward"]
    whole = sum(phases["exchange"].values())
    return (
        table(head, rows)
        + f"\nexposed communication: {1000 * exposed:.1f} ms, {exposed / whole:.0%} of the step"
        + f" of {record['parts']['ranks']} ranks"
    )


def _buckets(record: dict[str, Any]) -> str:
    rows = [
        [
            f"{number}",
            f"{one['bytes'] / MIB:.2f}",
            *(f"{1000 * one[name]:.0f}" for name in ("ready_s", "begin_s", "end_s")),
        ]
        for number, one in enumerate(record["parts"]["buckets"])
    ]
    return table(["bucket", "MiB", "ready", "sent from", "to"], rows) + (
        "\nms after the begin of the backward; ready: where nothing is sent"
    )


def _link(record: dict[str, Any]) -> str:
    link = Link(**record["link"])
    slower = link.stolen_s_per_byte * (link.busy_bytes_per_s or link.bytes_per_s)
    text = (
        f"link: {1e6 * link.latency_s:.0f} us, {_rate(link.bytes_per_s)};"
        f" while computing {_rate(link.busy_bytes_per_s)}, and computing {slower:.0%} slower"
    )
    pays = last_that_pays(work_of(record), lambda ranks: link, record["settings"]["strong"])
    return f"{text}\n{paying(pays)}"


def paying(last: int | None) -> str:
    """Return the line that says up to where more ranks pay."""
    if last is None:
        return "doubling the ranks gives half as much again, or more, up to 4096 ranks"
    return f"above {last} ranks, twice as many give less than half as much again"


def _rate(bytes_per_s: float) -> str:
    bits = 8 * bytes_per_s
    return f"{bits / 1e9:.2f} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.0f} Mbit/s"


def prediction(points: Sequence[Point]) -> str:
    """Return a table of a predicted curve."""
    rows = [
        [
            f"{one.ranks}",
            f"{1000 * one.step_s:.1f} ms",
            f"{one.images_per_s:.0f}",
            f"{one.efficiency:.2f}",
        ]
        for one in points
    ]
    return table(["ranks", "step", "images/s", "efficiency"], rows)


def all_reduce(record: dict[str, Any]) -> str:
    """Return the tables of a record of bench allreduce."""
    texts = []
    for name, timings in record["all_reduce"].items():
        rows = [
            [
                _size(one["bytes"]),
                f"{1e6 * one['seconds']:.0f}",
                f"{1e6 * one['least_s']:.0f} to {1e6 * one['most_s']:.0f}",
                f"{one['bytes_per_s'] / 1e6:.1f}",
                f"{one['bus_bytes_per_s'] / 1e6:.1f}",
            ]
            for one in timings
        ]
        head = ["bytes", "us", "least to most", "algorithm MB/s", "bus MB/s"]
        texts.append(f"{name}, {record['ranks']} ranks\n{table(head, rows)}")
    texts += [f"{name}: not measured: {why}" for name, why in record["not_measured"].items()]
    rows = [
        [
            f"{a} ({record['hosts'][a]}) - {b} ({record['hosts'][b]})",
            f"{1e6 * pair['latency_s']:.0f} us",
            _rate(pair["bytes_per_s"]),
            f"{1e6 * pair['tcp_round_trip_s'] / 2:.0f} us",
            _rate(pair["tcp_bytes_per_s"]),
        ]
        for pair in record["pairs"]
        for a, b in [pair["ranks"]]
    ]
    if rows:
        texts.append(table(["ranks", "message", "rate", "plain TCP", "rate"], rows))
    return "\n\n".join(texts)


def _size(count: int) -> str:
    for unit, name in ((MIB, "MiB"), (1 << 10, "KiB")):
        if count >= unit:
            return f"{count / unit:g} {name}"
    return f"{count} B"
