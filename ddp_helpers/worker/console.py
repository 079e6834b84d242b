"""What ranks print: one rank's log, whole lines from all, a progress bar on rank 0.

Copy this file alone.
Lesson: notebooks/01_processes_and_ranks.ipynb (say), notebooks/04_resnet_ddp.ipynb (logging)
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterable, Iterator


def rank_logger(rank: int, name: str = "train") -> logging.Logger:
    """Return a logger that prints INFO lines on rank 0 and only warnings, with the rank, elsewhere.

    Calling it again for the same name replaces the handler, so a line is never printed twice.
    """
    logger = logging.getLogger(name)
    logger.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    logger.propagate = False
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(
        logging.Formatter("%(message)s" if rank == 0 else f"[rank {rank}] %(message)s")
    )
    logger.handlers = [handler]
    return logger


def say(rank: int, text: str) -> None:
    """Print text with [rank N] before each line, so that lines of several ranks never mix.

    A launcher merges what its ranks write. print() writes a line and its end separately, and
    another rank's text can come between; here each line goes out in a single write.
    """
    for line in text.splitlines() or [""]:
        _write(f"[rank {rank}] {line}\n")


def print_in_rank_order(rank: int, world_size: int, text: str) -> None:
    """Print every rank's text on rank 0, in rank order. Every rank of the group must call it."""
    import torch.distributed as dist

    texts: list[str | None] = [text]
    if world_size > 1:
        texts = [None] * world_size
        dist.all_gather_object(texts, text)
    if rank == 0:
        for number, one in enumerate(texts):
            say(number, one or "")


def progress(iterable: Iterable, rank: int, desc: str | None = None) -> Iterable:
    """Return iterable with a tqdm bar on rank 0 of a terminal, and unchanged everywhere else."""
    if rank != 0 or not sys.stderr.isatty():
        return iterable
    try:
        from tqdm import tqdm
    except ImportError:
        return iterable
    return tqdm(iterable, desc=desc, leave=False)


@contextlib.contextmanager
def short_errors(*kinds: type[BaseException]) -> Iterator[None]:
    """End the process with status 1 and the error's text alone when one of kinds is raised."""
    try:
        yield
    except kinds as error:
        sys.stdout.flush()
        sys.stderr.write(f"error: {error}\n")
        sys.exit(1)


def _write(line: str) -> None:
    sys.stdout.flush()
    if sys.stdout is sys.__stdout__:
        os.write(sys.stdout.fileno(), line.encode())
    else:  # a notebook's or a test's stdout is no file
        sys.stdout.write(line)
        sys.stdout.flush()
