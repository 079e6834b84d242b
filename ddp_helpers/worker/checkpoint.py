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
        state: dict[str, Any] = {
            n: part.state_dict() for n, part in parts.items() if part is not None
        }
        state["model"] = unwrap(model).state_dict()
        state |= {"epoch": epoch, "random_states": random_states}
        try:
            _write(Path(path), state)
        except Exception as error:  # on this rank alone: the others must hear of it
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
        _restore(path, state, model, {n: part for n, part in parts.items() if part is not None})
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
    """Return state with a wrapper's prefix cut from every key, if more keys fit expected then.

    A model may itself have a submodule called `module`: its keys fit as they are, and stay.
    """
    best = state
    while prefix := next(
        (p for p in _PREFIXES if state and all(k.startswith(p) for k in state)), ""
    ):
        state = {key[len(prefix) :]: value for key, value in state.items()}
        if len(state.keys() & expected) > len(best.keys() & expected):
            best = state
    return best


def _write(path: Path, state: dict[str, Any]) -> None:
    """Write beside path and rename: a crash leaves the old file, never half of a new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    half_written = path.with_name(f".{path.name}.tmp")
    try:
        with open(half_written, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(half_written, path)
    finally:
        half_written.unlink(missing_ok=True)


def _restore(path: str | Path, state: dict[str, Any], model: nn.Module, parts: dict) -> None:
    inner = unwrap(model)
    saved = without_prefix(state["model"], set(inner.state_dict()))
    _check_fit(path, saved, inner.state_dict())
    missing = [name for name in parts if name not in state]
    if missing:
        raise CheckpointError(f"{path} was saved without {', '.join(missing)}.")
    try:
        inner.load_state_dict(saved)
        for name, part in parts.items():
            part.load_state_dict(state[name])
    except (KeyError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} does not fit: {_first_line(error)}") from error


def _check_fit(path: str | Path, saved: dict[str, Any], expected: dict[str, Any]) -> None:
    """Raise CheckpointError with the keys and shapes in which saved and expected differ."""
    shapes = [
        f"{key} {tuple(saved[key].shape)} not {tuple(value.shape)}"
        for key, value in expected.items()
        if key in saved and saved[key].shape != value.shape
    ]
    differences = {
        "missing": [key for key in expected if key not in saved],
        "not in the model": [key for key in saved if key not in expected],
        "other shape": shapes,
    }
    lines = [f"{what}: {_listed(keys)}" for what, keys in differences.items() if keys]
    if lines:
        raise CheckpointError("\n".join([f"{path} is of another model.", *lines]))


def _listed(keys: list[str]) -> str:
    more = f" and {len(keys) - 8} more" if len(keys) > 8 else ""
    return ", ".join(keys[:8]) + more


def _random_state() -> dict[str, Any]:
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    return {"python": random.getstate(), "torch": torch.get_rng_state(), "cuda": cuda}


def _set_random_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"].cpu())  # map_location may have moved it
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"].cpu())


def _raise_on_all(reason: str | None) -> None:
    """Raise CheckpointError on every rank when one of them has a reason: nobody goes on alone."""
    reasons = _gather(reason)
    failed = [rank for rank, text in enumerate(reasons) if text]
    if failed:
        where = "" if len(failed) == len(reasons) else f"rank {failed[0]}: "
        raise CheckpointError(where + reasons[failed[0]])


def _gather(value: Any) -> list[Any]:
    """Return every rank's value, rank 0 first."""
    values = [value]
    if dist.is_initialized():
        values *= dist.get_world_size()
        dist.all_gather_object(values, value)
    return values


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
