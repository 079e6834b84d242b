"""Make this rank's replica of the model: random numbers, threads, device, DDP.

Copy with checks.py.

    set_seed(0, rank)
    set_threads(local_world_size)
    model = wrap(model, device)

Lesson: notebooks/04_resnet_ddp.ipynb
"""

from __future__ import annotations

import os
import random

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

try:
    from .checks import TrainingError
except ImportError:  # copied next to a script
    from checks import TrainingError


def set_seed(seed: int, rank: int = 0) -> None:
    """Seed Python's and torch's random numbers with seed + rank.

    Ranks differ on purpose, for random crops and dropout. Their parameters do not: DDP copies
    those of rank 0 to the others.
    """
    random.seed(seed + rank)
    torch.manual_seed(seed + rank)


def set_threads(local_world_size: int) -> None:
    """Share the cores this process may use out to the node's ranks.

    A number of threads that the user or the launcher has set in OMP_NUM_THREADS stays.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        torch.set_num_threads(max(1, cores // local_world_size))


def wrap(
    model: nn.Module,
    device: torch.device,
    *,
    channels_last: bool = False,
    compile: bool = False,
    sync_bn: bool = False,
    find_unused_parameters: bool = False,
) -> DDP:
    """Move model to device and return it in DDP; needs a process group.

    compile is torch.compile in place: the names of the parameters stay as they are. sync_bn
    takes BatchNorm's statistics over all ranks; it raises TrainingError on a CPU.
    find_unused_parameters lets a step leave parameters out, for a search of the graph each step.
    """
    if sync_bn:
        if device.type != "cuda":
            raise TrainingError(
                "SyncBatchNorm runs on GPUs only, and this rank trains on the CPU.\n"
                "Leave --sync_bn out: each rank then normalises with its own images."
            )
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    model = model.to(device)
    if channels_last:
        model = model.to(memory_format=torch.channels_last)
    if compile:
        model.compile()
    return DDP(
        model,
        device_ids=[device] if device.type == "cuda" else None,  # a CPU model must have none
        find_unused_parameters=find_unused_parameters,
        gradient_as_bucket_view=True,  # .grad is the memory that is exchanged: one copy less
    )
