"""Save and resume a training run: one file, whole or not at all, the same bits afterwards.

Copy this file alone.

    save("run/checkpoint.pt", model, optimizer, scheduler, epoch=epoch + 1)     # every rank
    first_epoch = load("run/checkpoint.pt", model, optimizer, scheduler)        # every rank

Rank 0 writes. The keys of the model have no `module.`, so the file loads into a wrapped and into
a plain model, on any number of ranks.
Lesson: notebooks/04_resnet_ddp.ipynb, notebooks/08_when_it_hangs.ipynb
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

_PREFIXES = ("module.", "_orig_mod.")  # of DDP and of torch.compile
_EXPECTED = ("model", "epoch", "random_states")


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; the text names the file and the reason."""


def save(
    path: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
    scaler: torch.amp.GradScaler | None = None,
    epoch: int = 0,
) -> None:
    """Write path, with the random states of all ranks; epoch counts the finished epochs.

    Every rank must call it; rank 0 writes. The file replaces the old one only when it is
    complete and on disk. Raises CheckpointError, on every rank, when it could not be written.
    """
    random_states = _gather(_random_state())
    reason = None
    if _rank() == 0:
        parts = {"optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
        state: dict[str, Any] = {name: part.state_dict() for name, part in parts.items() if part}
        state["model"] = unwrap(model).state_dict()
        state |= {"epoch": epoch, "random_states": random_states}
        try:
            _write(Path(path), state)
        except (OSError, RuntimeError) as error:
            reason = f"{path} could not be written: {_first_line(error)}"
    _raise_on_all(reason)


def load(
    path: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
    scaler: torch.amp.GradScaler | None = None,
    map_location: torch.device | str = "cpu",
) -> int:
    """Put everything back as it was when path was saved and return the finished epochs.

    Every rank must call it, and reads the file itself, to map_location. Random states come back
    when the number of ranks is the same as it was. Raises CheckpointError, on every rank, when
    one of them cannot read the file or it does not fit.
    """
    reason, state = None, {}
    try:
        state = read(path, map_location)
        parts = {"optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
        _restore(path, state, model, {name: part for name, part in parts.items() if part})
    except CheckpointError as error:
        reason = str(error)
    _raise_on_all(reason)
    if len(state["random_states"]) == (dist.get_world_size() if dist.is_initialized() else 1):
        _set_random_state(state["random_states"][_rank()])
    return state["epoch"]


def read(path: str | Path, map_location: torch.device | str = "cpu") -> dict[str, Any]:
    """Return the contents of a checkpoint file; raises CheckpointError when it is not one."""
    if not Path(path).exists():
        raise CheckpointError(f"There is no checkpoint {path}.")
    try:
        # weights_only: a file from elsewhere cannot run code in this process.
        state = torch.load(path, map_location=map_location, weights_only=True)
    except Exception as error:
        raise CheckpointError(
            f"{path} is damaged or no checkpoint: {_first_line(error)}\n"
            "Remove it, or continue from an older copy."
        ) from error
    missing = [n for n in _EXPECTED if not isinstance(state, dict) or n not in state]
    if missing:
        raise CheckpointError(
            f"{path} is no checkpoint of this program: {', '.join(missing)} not in it."
        )
    return state


def unwrap(model: nn.Module) -> nn.Module:
    """Return the model inside DDP and torch.compile, in whatever order they were applied."""
    while True:
        if isinstance(model, DDP):
            model = model.module
        elif "_orig_mod" in model._modules:  # what torch.compile(model) returns
            model = model._orig_mod
        else:
            return model


def without_prefix(state: dict[str, Any], expected: set[str]) -> dict[str, Any]:
    """Return state with a wrapper's prefix cut from its keys, if they fit only without it.

    A model may itself have a submodule called `module`: its keys fit as they are, and stay.
    """
    for prefix in _PREFIXES:
        if expected != set(state) and all(key.startswith(prefix) for key in state):
            state = {key[len(prefix) :]: value for key, value in state.items()}
    return state
