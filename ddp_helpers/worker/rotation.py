"""Keep the last few checkpoints of a run in a folder, and continue from the newest sound one.

Copy with checkpoint.py.

    position = load_newest("run", model, optimizer, scheduler)                    # every rank
    save_next("run", 3, model, optimizer, scheduler, epoch=epoch, step=step)      # every rank

Rank 0 writes, and the folder must be one that every rank sees.
Lesson: notebooks/08_when_it_hangs.ipynb
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch.distributed as dist

try:
    from .checkpoint import CheckpointError, DamagedCheckpoint, Position, load, raise_on_all, save
except ImportError:  # copied next to a script
    from checkpoint import CheckpointError, DamagedCheckpoint, Position, load, raise_on_all, save

_NAME = re.compile(r"checkpoint_e(\d+)_s(\d+)\.pt")


def path_of(folder: str | Path, epoch: int, step: int) -> Path:
    """Return the path of the checkpoint after epoch epochs and step steps of the next."""
    return Path(folder) / f"checkpoint_e{epoch:04}_s{step:06}.pt"


def found(folder: str | Path) -> list[Path]:
    """Return the checkpoints in folder, the newest first."""
    return _newest_first(path for path in Path(folder).glob("*.pt") if _NAME.fullmatch(path.name))


def save_next(
    folder: str | Path, keep: int, *state: Any, epoch: int, step: int = 0, **options: Any
) -> Path:
    """Save to folder as checkpoint.save does, remove all but the newest keep, return the path.

    Every rank must call it. Only when the new file is complete and on disk do others go; among
    them those of a later step, which a run has left behind that went back to an older one.
    """
    path = path_of(folder, epoch, step)
    if _is_rank_0():  # what a process that was killed has left half-written fills the disk
        _remove(Path(folder).glob(".checkpoint_*.pt.tmp"))
    save(path, *state, epoch=epoch, step=step, **options)
    if _is_rank_0():
        files = found(folder)
        kept = files[files.index(path) :][:keep]
        _remove(set(files) - set(kept))
    return path


def load_newest(
    folder: str | Path, *state: Any, say: Callable[[str], None] = print, **options: Any
) -> Position | None:
    """Load the newest checkpoint of folder as checkpoint.load does; None when there is none.

    Every rank must call it. Says which one it took, and which newer ones were damaged. Raises
    CheckpointError, on every rank, when all are, or when the newest sound one does not fit.
    """
    files = _seen_by_any_rank(folder)
    damaged = None
    for path in files:
        try:
            position = load(path, *state, **options)
        except DamagedCheckpoint as error:
            damaged = error
            say(f"{str(error).splitlines()[0]}; trying the one before it")
            continue
        say(f"continuing {path} {_where(position)}")
        return position
    if damaged:
        raise damaged
    return None


def refuse_used(folder: str | Path) -> None:
    """Raise CheckpointError, on every rank, when folder holds a run: a new one would replace it.

    Every rank must call it.
    """
    error = None
    if files := _candidates(folder):
        error = CheckpointError(
            f"{files[0]} is of an earlier run.\nContinue it with --resume, or save elsewhere."
        )
    raise_on_all(error)


def _where(position: Position) -> str:
    where = f"with epoch {position.epoch + 1}"
    if position.step:
        return f"{where}, step {position.step + 1}"
    return f"{where}, from its start ({position.note})" if position.note else where


def _seen_by_any_rank(folder: str | Path) -> list[Path]:
    """Return what any rank finds: a rank that misses one must say so, not start from nothing."""
    of_ranks = [_candidates(folder)]
    if dist.is_initialized():
        of_ranks *= dist.get_world_size()
        dist.all_gather_object(of_ranks, of_ranks[0])
    return _newest_first(path for paths in of_ranks for path in paths)


def _candidates(folder: str | Path) -> list[Path]:
    """Return the checkpoints in folder and, behind them, one that has no place in its name."""
    return found(folder) + [path for path in [Path(folder) / "checkpoint.pt"] if path.exists()]


def _newest_first(paths: Iterable[Path]) -> list[Path]:
    return sorted(set(paths), key=_place, reverse=True)


def _place(path: Path) -> tuple[int, ...]:
    match = _NAME.fullmatch(path.name)
    return tuple(map(int, match.groups())) if match else (-1,)


def _remove(paths: Iterable[Path]) -> None:
    for path in paths:
        with contextlib.suppress(OSError):  # one that stays is no reason to stop training
            path.unlink()


def _is_rank_0() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0
