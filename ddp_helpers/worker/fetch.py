"""Fetch a folder once, although many ranks on many nodes want it. Standard library only.

Copy this file alone.

    fetch_once(Path("data/my-images"), download, env.local_rank)

Works before init_process_group and without one: ranks meet in the file system, where the data is.
Lesson: notebooks/04_resnet_ddp.ipynb
"""

from __future__ import annotations

import os
import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path


class DataNotAvailable(RuntimeError):
    """The data is neither on disk nor could be fetched; the text says what to do."""


def fetch_once(
    final: Path,
    fetch: Callable[[Path], object],
    local_rank: int,
    timeout_s: float = 600.0,
    hint: str = "",
) -> None:
    """Return when the folder final is there, made by one of the processes that share its disk.

    Local rank 0 of each node tries to be the one. It calls fetch(folder), which puts final.name
    into that empty folder, and renames the result to final: nobody ever sees half of it.
    Raises DataNotAvailable on every rank: within seconds when fetch failed, after timeout_s when
    nothing came. hint is added to the text of a failure: what to do about it.
    """
    if final.is_dir():
        return
    _make_folder(final.parent)
    lock = final.with_name(f".{final.name}.lock")
    failure = final.with_name(f".{final.name}.failed")
    if local_rank == 0 and _take(lock):
        _fetch(final, fetch, lock, failure, hint)
    else:
        _wait(final, lock, failure, timeout_s)


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataNotAvailable(f"Cannot make the folder {folder}: {error.strerror}.") from error
    if not os.access(folder, os.W_OK):
        raise DataNotAvailable(f"Cannot write to the folder {folder.absolute()}.")


def _take(lock: Path) -> bool:
    """Return True when this process has made the lock file, and so no other on any node has."""
    try:
        file = os.open(lock, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    except FileExistsError:
        return False
    os.write(file, f"{socket.gethostname()} {os.getpid()}".encode())
    os.close(file)
    return True


def _fetch(
    final: Path, fetch: Callable[[Path], object], lock: Path, failure: Path, hint: str
) -> None:
    """Fetch into a folder of our own, rename, and release the lock; leave word of a failure."""
    partial = final.with_name(f".{final.name}.partial")
    failure.unlink(missing_ok=True)
    try:
        if final.is_dir():  # another node was done between our look and our lock
            return
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        fetch(partial)
        os.rename(partial / final.name, final)
    except BaseException as error:
        text = f"{final.absolute()} is not there and could not be fetched: {_short(error)}"
        failure.write_text("\n".join(filter(None, [text, hint])))
        if not isinstance(error, Exception):  # Ctrl-C stays Ctrl-C
            raise
        raise DataNotAvailable(failure.read_text()) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        lock.unlink(missing_ok=True)


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _wait(final: Path, lock: Path, failure: Path, timeout_s: float) -> None:
    """Return when final is there; raise when the fetching process failed or died."""
    deadline = time.monotonic() + timeout_s
    failed_since = None
    while not final.is_dir():
        now = time.monotonic()
        if not lock.exists() and _is_recent(failure):
            # A new attempt removes the word of an earlier one: give it a second to begin.
            failed_since = failed_since or now
            if now > failed_since + 1:
                raise DataNotAvailable(failure.read_text())
        else:
            failed_since = None
        if _is_stale(lock) and not final.is_dir():
            raise DataNotAvailable(
                f"The process that fetched {final.name} ended before it was done.\n"
                f"Remove its lock and start again: rm {lock.absolute()}"
            )
        if now > deadline:
            raise DataNotAvailable(_nothing_came(final, lock, timeout_s))
        time.sleep(0.1)


def _is_recent(failure: Path) -> bool:
    """True for a word of failure less than a minute old: it is about this job's attempt."""
    try:
        return time.time() - failure.stat().st_mtime < 60
    except FileNotFoundError:
        return False


def _is_stale(lock: Path) -> bool:
    """True when the lock was made on this host by a process that is no more."""
    try:
        host, pid = lock.read_text().split()
    except (FileNotFoundError, ValueError):  # released, or not yet written
        return False
    if host != socket.gethostname():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return lock.exists()
    except PermissionError:  # another user's process
        return False
    return False


def _nothing_came(final: Path, lock: Path, timeout_s: float) -> str:
    text = f"{final.absolute()} did not come within {timeout_s:g} s."
    if lock.exists():
        return (
            f"{text}\nIf the process that {lock.absolute()} names is not running any more,"
            " remove that file and start again."
        )
    return f"{text}\nLocal rank 0 of this node should fetch it: is it running?"
