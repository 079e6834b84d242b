"""The processes behind a notebook's ranks: marked, found again, and ended with the notebook.

Every process of one start carries that start's name in its environment. The name says which kernel
chose it, and a keeper (keeper.py) runs on every host for as long as that kernel lives: marked
processes without a keeper are leftovers.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

MARKER = "DDP_HELPERS_ENGINES"
KEEPER = "ddp_helpers.lesson.keeper"  # python -m KEEPER NAME is the keeper of a start
_PREFIX = "ddp_helpers_engines_"
_STOP_S = 3.0  # from a polite SIGTERM to SIGKILL


def new_name() -> str:
    """Return a name for what this process is about to start, the same on every host."""
    return f"{_PREFIX}{os.getpid()}_{secrets.token_hex(4)}"


def make_folder(name: str) -> Path:
    """Return a new private folder of this host for the processes called name."""
    folder = Path(tempfile.gettempdir(), f"{name}{_ending()}")
    folder.mkdir(mode=0o700)
    return folder


def start(
    argv: Sequence[str], folder: Path, log: str, environ: Mapping[str, str]
) -> subprocess.Popen:
    """Start argv marked as folder's, in a session of its own, with its output in folder/log."""
    with open(folder / log, "wb") as output:
        return subprocess.Popen(
            argv,
            env={**environ, MARKER: name_of(folder)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # an interrupted cell must not interrupt the ranks' launcher
        )


def name_of(folder: Path) -> str:
    """Return the name of the start that a folder made by make_folder belongs to."""
    return folder.name.removesuffix(_ending())


def marked(name: str) -> list[psutil.Process]:
    """Return the running processes of this user that carry name."""
    return [process for process, carried in _all_marked() if carried == name]


def of_kernel(pid: int) -> list[psutil.Process]:
    """Return the running processes, keepers too, of the kernel with this process number."""
    mark = re.compile(rf"{_PREFIX}{pid}_")
    return [process for process, name in [*_all_marked(), *_keepers()] if mark.match(name)]


def stop(folder: Path) -> None:
    """End every process that is marked as folder's, and remove the folder."""
    name = name_of(folder)
    processes = marked(name)
    pids = {process.pid for process in processes}
    for process in processes:
        with contextlib.suppress(psutil.Error):
            # SIGTERM to the launchers alone: mpirun ends its ranks and cleans up after them.
            if process.ppid() not in pids:
                process.terminate()
    _wait_until_gone(name)
    for process in marked(name):
        with contextlib.suppress(psutil.Error):
            process.kill()
    _wait_until_gone(name)
    shutil.rmtree(folder, ignore_errors=True)


def leftovers() -> list[Path]:
    """Return the folders of starts that have left something on this host and have no keeper."""
    folder_of = {
        name: Path(tempfile.gettempdir(), f"{name}{_ending()}") for _, name in _all_marked()
    }
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*{_ending()}"):
        folder_of[name_of(folder)] = folder
    # Asked after: whoever starts meanwhile has its keeper before it has a folder or a process.
    kept = {name for _, name in _keepers()}
    return [f for name, f in sorted(folder_of.items()) if name not in kept and _is_mine(f)]


def stop_leftovers() -> None:
    """End what starts without a keeper have left on this host, and nothing of the others."""
    for folder in leftovers():
        stop(folder)


def _ending() -> str:
    """Return the end of this host's folder names: hosts may share the place for them."""
    return f".{socket.gethostname()}"


def _all_marked() -> list[tuple[psutil.Process, str]]:
    found = []
    for process in psutil.process_iter():
        # AccessDenied: another user's, and so not ours.
        with contextlib.suppress(psutil.Error, OSError):
            name = process.environ().get(MARKER) if process.pid != os.getpid() else None
            if name and process.status() != psutil.STATUS_ZOMBIE:
                found.append((process, name))
    return found


def _keepers() -> list[tuple[psutil.Process, str]]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            words = process.cmdline()  # a zombie has none
            # Three words from the end: the shell and ssh that start one hold them as a single word.
            if words[-3:-1] == ["-m", KEEPER]:
                found.append((process, words[-1]))
    return found


def _wait_until_gone(name: str) -> None:
    deadline = time.monotonic() + _STOP_S
    while marked(name) and time.monotonic() < deadline:
        time.sleep(0.03)


def _is_mine(folder: Path) -> bool:
    try:
        return folder.stat().st_uid == os.getuid() and not folder.is_symlink()
    except FileNotFoundError:  # removed already, but a process still carries its name
        return True
