"""Save and resume a training run: one file, whole or not at all, the same bits afterwards.

Copy this file alone.

    save("run/checkpoint.pt", model, optimizer, scheduler, epoch=epoch + 1)     # every rank
    position = load("run/checkpoint.pt", model, optimizer, scheduler)           # every rank
    first_epoch = position.epoch

Rank 0 writes. The keys of the model have no `module.`, so the file loads into a wrapped and into
a plain model, on any number of ranks.
Lesson: notebooks/04_resnet_ddp.ipynb, notebooks/08_when_it_hangs.ipynb
"""

from __future__ import annotations

import contextlib
import os
import random
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

_PREFIXES = ("module.", "_orig_mod.")  # of DDP and of torch.compile
_EXPECTED = ("model", "epoch", "step", "layout", "ranks")


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; the text names the file and the reason."""


class DamagedCheckpoint(CheckpointError):
    """The file is not what was written: an older one may still be whole."""


@dataclass(frozen=True)
class Position:
    """Where a run stood when it was saved."""

    epoch: int  # finished epochs
    step: int = 0  # finished steps of the epoch after them
    mine: Any = None  # what this rank gave to save
    note: str = ""  # why the epoch begins anew, with step 0 and nothing in mine


def save(
    path: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
    scaler: torch.amp.GradScaler | None = None,
    epoch: int = 0,
    step: int = 0,
    mine: Any = None,
    layout: Mapping[str, Any] | None = None,
) -> None:
    """Write path, with the random states of all ranks; epoch counts the finished epochs.

    step counts the steps after them. mine comes back to the rank that gave it: numbers and text,
    also in lists and dictionaries. layout says what decides the images of a step, such as
    {"batch_size": 32}. Every rank must call it; rank 0 writes. The file replaces the old one
    only when it is complete and on disk. Raises CheckpointError, on every rank, when it could
    not be written.
    """
    ranks = _gather({**_random_state(), "mine": mine})
    error = None
    if _rank() == 0:
        parts = {"optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
        state: dict[str, Any] = {
            n: part.state_dict() for n, part in parts.items() if part is not None
        }
        state["model"] = unwrap(model).state_dict()
        state |= {"epoch": epoch, "step": step, "layout": dict(layout or {}), "ranks": ranks}
        try:
            _write(Path(path), state)
        except Exception as reason:  # on this rank alone: the others must hear of it
            error = CheckpointError(f"{path} could not be written: {_reason(_first(reason))}")
    raise_on_all(error)


def load(
    path: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
    scaler: torch.amp.GradScaler | None = None,
    map_location: torch.device | str = "cpu",
    layout: Mapping[str, Any] | None = None,
) -> Position:
    """Put everything back as it was when path was saved and return where the run stood.

    Every rank must call it, and reads the file itself, to map_location. On another number of
    ranks, or with another layout, a step has other images: then the position is the start of
    the epoch and says why, and on another number of ranks the random states stay as they are.
    Raises CheckpointError, on every rank, when one of them cannot read the file or it does not
    fit; DamagedCheckpoint when the file is not whole.
    """
    error, state = None, {}
    try:
        state = read(path, map_location)
        parts = {"optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
        _restore(path, state, model, {n: part for n, part in parts.items() if part is not None})
    except CheckpointError as reason:
        error = reason
    raise_on_all(error)
    ranks = state["ranks"]
    before = {"ranks": len(ranks), **state["layout"]}
    now = {"ranks": len(_gather(None)), **(layout or {})}
    mine = None
    if before["ranks"] == now["ranks"]:
        mine = ranks[_rank()]
        _set_random_state(mine)
    if before == now:
        return Position(state["epoch"], state["step"], mine["mine"])
    return Position(state["epoch"], note=_differences(before, now) if state["step"] else "")


def read(path: str | Path, map_location: torch.device | str = "cpu") -> dict[str, Any]:
    """Return the contents of a checkpoint file; raises CheckpointError when it is not one."""
    if not Path(path).exists():
        raise CheckpointError(f"There is no checkpoint {path}.")
    try:
        with zipfile.ZipFile(path) as file:  # torch.load itself does not compare the checksums
            if broken := file.testzip():
                raise zipfile.BadZipFile(f"{broken} is not what was written")
        # weights_only: a file from elsewhere cannot run code in this process.
        state = torch.load(path, map_location=map_location, weights_only=True)
    except Exception as error:
        raise DamagedCheckpoint(
            f"{path} is damaged or no checkpoint: {_reason(error)}\n"
            "Remove it, or continue from an older copy."
        ) from error
    missing = [n for n in _EXPECTED if not isinstance(state, dict) or n not in state]
    if missing and isinstance(state, dict) and "random_states" in state:
        raise CheckpointError(
            f"{path} was written by an older version of this program, which did not say at which"
            " step.\nFinish the run with that version, or start a new one."
        )
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
        _sync_folder(path.parent)
    finally:
        half_written.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    """Make a rename survive a loss of power, where folders can be opened for that."""
    with contextlib.suppress(OSError):
        number = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


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
        raise CheckpointError(f"{path} does not fit: {_reason(error)}") from error


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


def raise_on_all(error: CheckpointError | None) -> None:
    """Raise on every rank when one of them has an error: nobody goes on alone."""
    errors = _gather(error)
    failed = [rank for rank, one in enumerate(errors) if one]
    if failed:
        where = "" if len(failed) == len(errors) else f"rank {failed[0]}: "
        first = errors[failed[0]]
        raise type(first)(where + str(first))


def _differences(before: dict[str, Any], now: dict[str, Any]) -> str:
    """Return what differs, such as "ranks 4 then, 2 now"."""
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    return "; ".join(f"{name} {before.get(name)} then, {now.get(name)} now" for name in names)


def _gather(value: Any) -> list[Any]:
    """Return every rank's value, rank 0 first."""
    values = [value]
    if dist.is_initialized():
        values *= dist.get_world_size()
        dist.all_gather_object(values, value)
    return values


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _first(error: BaseException) -> BaseException:
    """Return what went wrong first: torch speaks of a wrong place in the file on a full disk."""
    while error.__context__:
        error = error.__context__
    return error


def _reason(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
