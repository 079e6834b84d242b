"""Checks on what all ranks must have in common: a difference stops every rank with one text.

Copy this file alone. Without a process group there is one rank, and nothing differs.
Lesson: notebooks/04_resnet_ddp.ipynb, notebooks/08_when_it_hangs.ipynb
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Sized
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class TrainingError(RuntimeError):
    """Training cannot go on: the text says which rank or parameter, and what to change."""


def parameters_hash(model: nn.Module) -> str:
    """Return a sha256 over the names and bytes of model's parameters; buffers do not count.

    Equal parameters give equal text on any device, wrapped in DDP or not. BatchNorm's running
    statistics are buffers: they differ between ranks while training, and are left out.
    """
    digest = hashlib.sha256()
    for name, parameter in _inner(model).named_parameters():
        digest.update(name.encode())
        digest.update(_bytes(parameter))
    return digest.hexdigest()


def check_equal_replicas(model: nn.Module) -> None:
    """Raise TrainingError with the first parameter that is not equal on every rank, and the ranks.

    Every rank must call it.
    """
    parameters = _inner(model).named_parameters()
    by_rank = _gather({name: hashlib.sha256(_bytes(p)).hexdigest() for name, p in parameters})
    for name, digest in by_rank[0].items():
        different = [rank for rank, digests in enumerate(by_rank) if digests.get(name) != digest]
        if different:
            raise TrainingError(
                f"{name} is not the same on rank 0 and on {_ranks(different)}.\n"
                "Wrap the model in DDP on every rank, and change it only through optimizer.step()."
            )


def check_equal_lengths(batches: Sized) -> None:
    """Raise TrainingError when ranks have different numbers of batches: DDP would wait for ever.

    Every rank must call it. Your own loop can train on uneven data inside
    `with torch.distributed.algorithms.join.Join([ddp_model]):` and needs no such check then.
    """
    lengths = _gather(len(batches))
    if len(set(lengths)) > 1:
        seen = ", ".join(f"rank {rank}: {length}" for rank, length in enumerate(lengths))
        raise TrainingError(
            f"The ranks have different numbers of batches ({seen}), expected one number.\n"
            "Give the loader sampler=DistributedSampler(dataset), or train inside Join([model])."
        )


def check_all_parameters_used(model: nn.Module, loss: torch.Tensor) -> None:
    """Raise TrainingError with the parameters of a DDP model that loss does not depend on.

    Every rank must call it, between forward and backward. DDP itself fails one step later.
    """
    if not isinstance(model, DDP) or model.find_unused_parameters:
        return
    by_rank = _gather(unused_parameters(model.module, loss))
    names = list(dict.fromkeys(name for unused in by_rank for name in unused))
    if names:
        ranks = [rank for rank, unused in enumerate(by_rank) if unused]
        raise TrainingError(
            f"{', '.join(names)} got no gradient on {_ranks(ranks)}: DDP waits for it.\n"
            "Use it in forward, remove it, or pass find_unused_parameters=True (slower)."
        )


def unused_parameters(model: nn.Module, loss: torch.Tensor) -> list[str]:
    """Return the names of model's trainable parameters that loss does not depend on."""
    leaves, seen, nodes = set(), set(), [loss.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        if "CheckpointFunction" in node.name():  # hides what it recomputes from the graph
            return []
        seen.add(node)
        leaves.add(id(getattr(node, "variable", None)))
        nodes += [following for following, _ in node.next_functions]
    return [n for n, p in model.named_parameters() if p.requires_grad and id(p) not in leaves]


def _inner(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, DDP) else model


def _bytes(tensor: torch.Tensor) -> bytes:
    tensor = tensor.detach().cpu().contiguous()
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)  # numpy() would need numpy


def _gather(value: Any) -> list[Any]:
    """Return every rank's value, rank 0 first."""
    values = [value]
    if dist.is_initialized():
        values *= dist.get_world_size()
        dist.all_gather_object(values, value)
    return values


def _ranks(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + " and ".join(map(str, ranks))
