"""What a step of DDP costs on any number of ranks: a model to compute with before renting.

    work = Work(images=32, forward_s=0.06, backward_s=0.12, other_s=0.01,
                buckets=even_buckets(100e6))
    link = Link(latency_s=50e-6, bytes_per_s=1.25e9)
    for point in curve(work, lambda ranks: link, [1, 2, 4, 8, 256]):
        print(point.ranks, point.images_per_s, point.efficiency)

- A message costs latency + bytes / rate (Hockney, "The communication challenge for MPP", 1994).
- A ring all-reduce of n ranks takes 2(n-1) messages of bytes / n each (Patarasuk and Yuan,
  "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009).
- DDP sends a bucket of gradients as soon as the backward has filled it, in order, while the
  backward goes on (Li et al., "PyTorch Distributed", VLDB 2020, section 4.2). What is still under
  way when the backward ends is exposed: the step waits for it.
- Where no core is spare, sending takes computing time: Link.stolen_s_per_byte.

Standard library only. Lesson: notebooks/07_scaling.ipynb
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

MIB = 1 << 20


@dataclass(frozen=True)
class Bucket:
    """Gradients that are exchanged in one piece."""

    bytes: float
    ready: float  # the part of the backward, in [0, 1], after which they can be sent


@dataclass(frozen=True)
class Work:
    """What one rank does in a step, without the others. Seconds."""

    images: float  # of one rank in one step
    forward_s: float
    backward_s: float
    other_s: float  # data and optimizer
    buckets: tuple[Bucket, ...]  # in the order in which they are sent
    broadcast_bytes: float = 0.0  # buffers that DDP copies from rank 0 before each forward

    @property
    def alone_s(self) -> float:
        """The seconds of a step that exchanges nothing."""
        return self.forward_s + self.backward_s + self.other_s

    @property
    def bytes(self) -> float:
        """The bytes of all gradients."""
        return sum(bucket.bytes for bucket in self.buckets)


@dataclass(frozen=True)
class Link:
    """The slowest way between two neighbours in the ring of ranks."""

    latency_s: float
    bytes_per_s: float  # of one rank, in one direction, when nothing else is done
    busy_bytes_per_s: float | None = None  # while the rank also computes; None: the same
    stolen_s_per_byte: float = 0.0  # computing time lost for each byte sent meanwhile

    def at_most(self, bytes_per_s: float) -> Link:
        """Return this link with its rate limited."""
        busy = min(self.busy_bytes_per_s or self.bytes_per_s, bytes_per_s)
        return replace(self, bytes_per_s=min(self.bytes_per_s, bytes_per_s), busy_bytes_per_s=busy)


@dataclass(frozen=True)
class Span:
    """Something that a rank does from begin_s to end_s, counted from the step's beginning."""

    what: str  # "forward", "backward", "other", "broadcast" or "bucket"
    begin_s: float
    end_s: float
    bytes: float = 0.0


@dataclass(frozen=True)
class Step:
    """A step as the model sees it."""

    seconds: float
    exposed_s: float  # of it, waiting for gradients after the backward
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class Point:
    """A number of ranks, and what they give together."""

    ranks: int
    step_s: float
    images_per_s: float
    efficiency: float  # images/s per rank, of those of one rank alone


def all_reduce_s(total_bytes: float, ranks: int, link: Link) -> float:
    """Return the seconds of a ring all-reduce: 2(n-1) messages of a part of n each."""
    return 2 * (ranks - 1) * link.latency_s + ring_bytes(total_bytes, ranks) / link.bytes_per_s


def ring_bytes(total_bytes: float, ranks: int) -> float:
    """Return the bytes that each rank sends in a ring all-reduce of total_bytes."""
    return 2 * (ranks - 1) / ranks * total_bytes


def rate_to_hide(work: Work, ranks: int) -> float:
    """Return the bytes/s at which exchanging all gradients takes as long as the backward."""
    return ring_bytes(work.bytes, ranks) / work.backward_s


def even_buckets(
    total_bytes: float, bucket_bytes: float = 25 * MIB, first_bytes: float = MIB
) -> tuple[Bucket, ...]:
    """Return buckets as DDP cuts them where all layers are alike: a small one, then equal ones."""
    sizes = [min(first_bytes, total_bytes)]
    rest = total_bytes - sizes[0]
    count = math.ceil(rest / bucket_bytes)
    sizes += [rest / count] * count if count else []
    sent, buckets = 0.0, []
    for size in sizes:
        sent += size
        buckets.append(Bucket(size, sent / total_bytes))
    return tuple(buckets)


def simulate(work: Work, ranks: int, link: Link) -> Step:
    """Return the step of ranks that exchange gradients over link while they compute."""
    if ranks == 1:
        return Step(work.alone_s, 0.0, tuple(_computing(work, 0.0, work.backward_s)))
    begin = 0.0
    if work.broadcast_bytes:
        begin = math.ceil(math.log2(ranks)) * link.latency_s
        begin += work.broadcast_bytes / link.bytes_per_s
    start = begin + work.forward_s
    backward_s, sent = _overlapped(work, ranks, link)
    end = max([backward_s, *(last for _, last in sent)])
    spans = [Span("broadcast", 0.0, begin)] if begin else []
    spans += _computing(work, begin, backward_s, end)
    spans += [
        Span("bucket", start + first, start + last, bucket.bytes)
        for bucket, (first, last) in zip(work.buckets, sent, strict=True)
    ]
    return Step(start + end + work.other_s, end - backward_s, tuple(spans))


def _overlapped(work: Work, ranks: int, link: Link) -> tuple[float, list[tuple[float, float]]]:
    """Return when the backward ends, and when each bucket is sent, from the backward's begin."""
    busy_rate = link.busy_bytes_per_s or link.bytes_per_s
    speed = max(1 - link.stolen_s_per_byte * busy_rate, 0.05)  # of computing, while sending
    latency_s = 2 * (ranks - 1) * link.latency_s
    now, computed, end, sent = 0.0, 0.0, None, []
    for bucket in work.buckets:
        # Nothing is under way: compute at full speed until this bucket is ready.
        idle = max(bucket.ready * work.backward_s - computed, 0.0)
        now, computed = now + idle, computed + idle
        begin, todo = now, ring_bytes(bucket.bytes, ranks)
        both_s = min(latency_s + todo / busy_rate, (work.backward_s - computed) / speed)
        now, computed = now + both_s, computed + both_s * speed
        if end is None and computed > (1 - 1e-12) * work.backward_s:
            end = now
        # What the end of the backward has left to send goes at full rate.
        todo -= max(both_s - latency_s, 0.0) * busy_rate
        now += max(latency_s - both_s, 0.0) + max(todo, 0.0) / link.bytes_per_s
        sent.append((begin, now))
    return now + work.backward_s - computed if end is None else end, sent


def _computing(work: Work, begin: float, backward_s: float, end: float | None = None):
    start = begin + work.forward_s
    done = start + (backward_s if end is None else end)
    return [
        Span("forward", begin, start),
        Span("backward", start, start + backward_s),
        Span("other", done, done + work.other_s),
    ]


def accumulated(work: Work, batches: int) -> Work:
    """Return the step that exchanges gradients after the last of so many batches only."""
    before = (batches - 1) * (work.forward_s + work.backward_s)
    return replace(work, images=batches * work.images, forward_s=before + work.forward_s)


def compressed(work: Work, factor: float) -> Work:
    """Return the step that sends a factor'th of the bytes; compressing takes no time in it."""
    buckets = tuple(replace(bucket, bytes=bucket.bytes / factor) for bucket in work.buckets)
    return replace(work, buckets=buckets)


def shared(work: Work, ranks: float) -> Work:
    """Return one rank's step when ranks share the images of work: strong scaling.

    Forward and backward shrink with the images; small batches are slower than that in truth.
    """
    return replace(
        work,
        images=work.images / ranks,
        forward_s=work.forward_s / ranks,
        backward_s=work.backward_s / ranks,
    )


def curve(
    work: Work, link_of: Callable[[int], Link], counts: Sequence[int], strong: bool = False
) -> list[Point]:
    """Return a Point for each number of ranks; link_of(ranks) is the link that they exchange over.

    Weak scaling: every rank has the images of work. strong: all ranks together have them.
    """
    points = []
    for ranks in counts:
        mine = shared(work, ranks) if strong else work
        seconds = simulate(mine, ranks, link_of(ranks)).seconds
        together = ranks * mine.images / seconds
        alone = work.images / work.alone_s
        points.append(Point(ranks, seconds, together, together / (ranks * alone)))
    return points


def last_that_pays(
    work: Work, link_of: Callable[[int], Link], strong: bool = False, most: int = 4096
) -> int | None:
    """Return the number of ranks above which twice as many give less than half as much again.

    Powers of 2 are tried; None when doubling pays up to most ranks.
    """
    counts = [1 << power for power in range(int(math.log2(most)) + 1)]
    points = curve(work, link_of, counts, strong)
    for before, after in zip(points, points[1:], strict=False):
        if after.images_per_s < 1.5 * before.images_per_s:
            return before.ranks
    return None
