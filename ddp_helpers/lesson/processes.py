"""The processes behind a notebook's ranks: marked, watched, and ended with the notebook.

Every process of one start carries, in its environment, the path of that start's private folder,
and the folder's name says which notebook kernel made it. So whose a process is, and whether that
kernel still lives, can be read from the process itself.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

MARKER = "DDP_HELPERS_ENGINES"
_FOLDER = "ddp_helpers_engines_"
_STOP_S = 3.0  # from a polite SIGTERM to SIGKILL


def make_folder() -> Path:
    """Return a new private folder, named after this process."""
    kernel = psutil.Process()
    prefix = f"{_FOLDER}{kernel.pid}_{int(kernel.create_time())}_"
    return Path(tempfile.mkdtemp(prefix=prefix))


def start(
    argv: Sequence[str], folder: Path, log: str, environ: Mapping[str, str]
) -> subprocess.Popen:
    """Start argv marked with folder, in a session of its own, with its output in folder/log."""
    with open(folder / log, "wb") as output:
        return subprocess.Popen(
            argv,
            env={**environ, MARKER: str(folder)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # an interrupted cell must not interrupt the ranks' launcher
        )


def start_watcher(folder: Path) -> subprocess.Popen:
    """Start a process that stops everything of folder when this process has died.

    It waits at the end of a pipe. The system closes the pipe however this process ends, a
    SIGKILL included, which runs no cleanup in Python.
    """
    return subprocess.Popen(
        [sys.executable, "-m", __name__, str(folder)],
        env={**os.environ, MARKER: str(folder)},
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def marked(folder: Path | str) -> list[psutil.Process]:
    """Return the running processes of this user that carry folder, without this one."""
    return [process for process, path in _all_marked() if path == str(folder)]


def of_kernel(pid: int) -> list[psutil.Process]:
    """Return the running processes that the kernel with this process number has started."""
    mark = re.compile(rf"{_FOLDER}{pid}_\d+_")
    return [process for process, path in _all_marked() if mark.match(Path(path).name)]


def stop(folder: Path) -> None:
    """End every process that carries folder, and remove the folder."""
    processes = marked(folder)
    pids = {process.pid for process in processes}
    for process in processes:
        with contextlib.suppress(psutil.Error):
            # SIGTERM to the launchers alone: mpirun ends its ranks and cleans up after them.
            if process.ppid() not in pids:
                process.terminate()
    _wait_until_gone(folder)
    for process in marked(folder):
        with contextlib.suppress(psutil.Error):
            process.kill()
    _wait_until_gone(folder)
    shutil.rmtree(folder, ignore_errors=True)


def stop_leftovers() -> None:
    """End what the killed kernels of this user have left, and nothing of a live one."""
    folders = {path for _, path in _all_marked()}
    folders |= {str(path) for path in Path(tempfile.gettempdir()).glob(f"{_FOLDER}*")}
    for folder in map(Path, sorted(folders)):
        if _is_mine(folder) and not _kernel_lives(folder):
            stop(folder)


def _all_marked() -> list[tuple[psutil.Process, str]]:
    found = []
    for process in psutil.process_iter():
        # AccessDenied: another user's, and so not ours.
        with contextlib.suppress(psutil.Error, OSError):
            path = process.environ().get(MARKER) if process.pid != os.getpid() else None
            if path and process.status() != psutil.STATUS_ZOMBIE:
                found.append((process, path))
    return found


def _wait_until_gone(folder: Path) -> None:
    deadline = time.monotonic() + _STOP_S
    while marked(folder) and time.monotonic() < deadline:
        time.sleep(0.03)


def _is_mine(folder: Path) -> bool:
    try:
        return folder.stat().st_uid == os.getuid() and not folder.is_symlink()
    except FileNotFoundError:  # removed already, but a process still carries it
        return True


def _kernel_lives(folder: Path) -> bool:
    match = re.match(rf"{_FOLDER}(\d+)_(\d+)_", folder.name)
    if not match:
        return True  # not a name of ours: leave it alone
    try:
        kernel = psutil.Process(int(match[1]))
        # The start time too, because numbers of processes are used again.
        same = abs(kernel.create_time() - int(match[2])) < 5
        return same and kernel.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return True


def _watch(folder: Path) -> None:
    sys.stdin.buffer.read()  # returns when the notebook's kernel has gone
    if folder.exists():
        stop(folder)


if __name__ == "__main__":
    _watch(Path(sys.argv[1]))
