"""Sums, counts and means over all ranks that leave the caller's tensors alone.

Copy this file alone.

    loss_sum, images = all_sum([loss_sum, images], device).tolist()
    accuracy = mean_over_ranks(correct, images, device)

Why not dist.reduce: on every rank but dst it leaves half-finished sums in the caller's tensor.
Why not a mean of the ranks' means: it is wrong as soon as ranks hold different counts.
Lesson: notebooks/04_resnet_ddp.ipynb
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist


def all_sum(
    values: torch.Tensor | Sequence[float], device: torch.device | str | None = None
) -> torch.Tensor:
    """Return the element-wise sum of values over all ranks, as float64, the same on every rank.

    Every rank must call it, with values of the same shape. The result is a new tensor on device
    (default: where values are; nccl needs the rank's GPU). Without a process group it is a copy.
    """
    if not isinstance(values, torch.Tensor):
        values = torch.tensor(values, dtype=torch.float64)
    total = torch.empty(values.shape, dtype=torch.float64, device=device or values.device)
    total.copy_(values.detach())
    if dist.is_initialized():
        dist.all_reduce(total)
    return total


def mean(total: float, count: float) -> float:
    """Return total / count, and nan when nothing was counted."""
    return total / count if count else math.nan


def mean_over_ranks(total: float, count: float, device: torch.device | str | None = None) -> float:
    """Return the sum of all ranks' totals divided by the sum of all ranks' counts.

    Every rank must call it; a rank that counted nothing gives 0 and 0.
    """
    return mean(*all_sum([total, count], device).tolist())
