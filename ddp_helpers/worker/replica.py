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
import resource
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as DDP

try:
    from .checks import TrainingError
except ImportError:  # copied next to a script
    from checks import TrainingError


COMPRESSIONS = ("fp16", "bf16", "powersgd")
_ONE_BUCKET_MB = 1 << 20


def set_seed(seed: int, rank: int = 0) -> None:
    """Seed Python's and torch's random numbers with seed + rank.

    Ranks differ on purpose, for random crops and dropout. Their parameters do not: DDP copies
    those of rank 0 to the others.
    """
    random.seed(seed + rank)
    torch.manual_seed(seed + rank)


def set_threads(local_world_size: int, threads: int | None = None) -> None:
    """Let this rank compute with threads, or share the node's cores out to its ranks.

    Without threads, a number that the user or the launcher has set in OMP_NUM_THREADS stays.
    """
    if threads:
        torch.set_num_threads(threads)
    elif "OMP_NUM_THREADS" not in os.environ:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        torch.set_num_threads(max(1, cores // local_world_size))


def peak_memory_mb(device: torch.device) -> float:
    """Return the most memory in 10^6 bytes that this process has used: device's, or its own."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e6
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1e6 if sys.platform == "darwin" else peak * 1024 / 1e6  # Linux counts in KiB


def wrap(
    model: nn.Module,
    device: torch.device,
    *,
    channels_last: bool = False,
    compile: bool = False,
    sync_bn: bool = False,
    find_unused_parameters: bool = False,
    bucket_mb: float | None = None,
    bucket_view: bool = True,
    static_graph: bool = False,
    compress: str | None = None,
    group: dist.ProcessGroup | None = None,
) -> DDP:
    """Move model to device and return it in DDP; needs a process group: group, or the default.

    compile is torch.compile in place: the names of the parameters stay as they are. sync_bn
    takes BatchNorm's statistics over all ranks; it raises TrainingError on a CPU.
    find_unused_parameters lets a step leave parameters out, for a search of the graph each step.
    bucket_mb MiB of gradients are exchanged in one piece (None: 1 MiB first, then 25). bucket_view:
    .grad is the memory that is exchanged, one copy less. static_graph: every step uses the same
    parameters, in one order.
    compress: gradients travel as one of COMPRESSIONS; see compress_gradients.
    """
    if sync_bn:
        if device.type != "cuda":
            raise TrainingError(
                "SyncBatchNorm runs on GPUs only, and this rank trains on the CPU.\n"
                "Leave --sync_bn out: each rank then normalises with its own images."
            )
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    if compress == "powersgd" and dist.get_backend(group) == "gloo":
        # Its second and third exchange begin in gloo's threads: with several buckets, ranks would
        # exchange them in different orders.
        bucket_mb = _ONE_BUCKET_MB
    model = DDP(
        place(model, device, channels_last=channels_last, compile=compile),
        device_ids=[device] if device.type == "cuda" else None,  # a CPU model must have none
        process_group=group,
        find_unused_parameters=find_unused_parameters,
        bucket_cap_mb=bucket_mb,
        gradient_as_bucket_view=bucket_view,
        static_graph=static_graph,
    )
    if compress:
        model.register_comm_hook(*compress_gradients(compress, group))
    return model


def place(
    model: nn.Module, device: torch.device, *, channels_last: bool = False, compile: bool = False
) -> nn.Module:
    """Move model to device, and give it the memory format and compiler that wrap has too."""
    model = model.to(device)
    if channels_last:
        model = model.to(memory_format=torch.channels_last)
    if compile:
        model.compile()
    return model


def compress_gradients(name: str, group: dist.ProcessGroup | None = None) -> tuple:
    """Return (state, hook) for DDP.register_comm_hook, of a name in COMPRESSIONS.

    "fp16" and "bf16" send half the bytes. "powersgd" sends, after 10 steps, a matrix of rank 2 in
    place of each gradient, and adds what it left out to the next one (Vogels et al., "PowerSGD",
    NeurIPS 2019). What it has left out is in no checkpoint: a resumed run goes on without.
    """
    if name == "powersgd":
        state = powerSGD_hook.PowerSGDState(
            group, matrix_approximation_rank=2, start_powerSGD_iter=10
        )
        return state, powerSGD_hook.powerSGD_hook
    return group, getattr(default_hooks, f"{name}_compress_hook")
