"""One small process on each host of a notebook's ranks: the notebook's hands there.

    keeper = Keeper(name, host)     # on host over ssh; host None: on this machine
    keeper.greet(timeout_s)         # from now on keeper.folder is a folder there
    keeper.read(f"{keeper.folder}/output_of_12")

It sends signals to ranks and reads their files, also of ranks that hang, and nodes need not share a
file system. It waits at the end of a pipe, which the system closes however the notebook's kernel
ends: then it ends every process of the notebook on its host, and itself.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import queue
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ddp_helpers.launch.ssh import in_this_folder, ssh_command
from ddp_helpers.lesson import processes

_ANSWER_S = 10.0  # a busy host still answers in a small part of it
_STOP_S = 15.0  # twice what processes.stop() takes at most


class Keeper:
    """The notebook's end of the pipe. Of a host that is lost all answers are empty."""

    def __init__(self, name: str, host: str | None = None):
        argv = [sys.executable, "-m", processes.KEEPER, name]
        if host:
            argv = [*ssh_command(host, options=("LogLevel=ERROR",)), in_this_folder(argv)]
        self.host = host or "this machine"
        self._lost = False
        self.folder = self.host_name = ""
        self.connection: list[str] = []  # addresses and ports, here and there
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (open as long as the process)
        self._process = subprocess.Popen(
            argv,
            env={k: v for k, v in os.environ.items() if k != processes.MARKER},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,
        )
        self._numbers = itertools.count()
        self._lines: queue.SimpleQueue = queue.SimpleQueue()
        # In a thread, so that the notebook's stop button cannot cut an answer in two.
        threading.Thread(target=self._take_lines, daemon=True).start()

    def greet(self, timeout_s: float) -> None:
        """Wait until the keeper says where it is: its folder, host name and connection.

        Raises RuntimeError with what ssh or python said when it does not.
        """
        with contextlib.suppress(queue.Empty, ValueError):
            if line := self._lines.get(timeout=timeout_s):
                self.folder, self.host_name, self.connection = json.loads(line)
                return
        self.stop()
        self._errors.seek(0)
        said = self._errors.read().decode(errors="replace").strip().splitlines()
        raise RuntimeError(said[-1] if said else f"no answer within {timeout_s:g} s")

    def read(self, file: str, offset: int = 0) -> bytes:
        """Return the bytes of a file on the host from offset, b"" without the file."""
        return (self._ask("read", file, offset) or "").encode("latin-1")

    def write(self, file: str, text: str) -> None:
        """Make a private file on the host, whole or not at all."""
        self._ask("write", file, text)

    def remove(self, file: str) -> None:
        """Remove a file on the host, if it is there."""
        self._ask("remove", file)

    def signal(self, pid: int, number: int) -> None:
        """Send a signal to a process of the keeper's host, unless it has ended."""
        self._ask("signal", pid, number)

    def free_port(self) -> int | None:
        """Return a port of the keeper's host that is free for torch, None when there is none."""
        return self._ask("port")

    def is_lost(self) -> bool:
        """Return True when the keeper has not answered, or it or the ssh to it has ended."""
        return self._lost or self._process.poll() is not None

    def close(self) -> None:
        """Let the keeper end everything on its host, without waiting for it."""
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    def stop(self) -> None:
        """Let the keeper end everything on its host, and wait for that."""
        self.close()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _ask(self, task: str, *words: Any) -> Any:
        if self._lost:
            return None
        number = next(self._numbers)
        deadline = time.monotonic() + _ANSWER_S
        with contextlib.suppress(OSError, queue.Empty):
            # One write of one line: an interrupt cannot leave half a question either.
            os.write(self._process.stdin.fileno(), _line([number, task, *words]))
            while line := self._lines.get(timeout=max(0.0, deadline - time.monotonic())):
                answered, answer = json.loads(line)
                if answered == number:  # not that of a question which was interrupted
                    return answer
        self._lost = True
        return None

    def _take_lines(self) -> None:
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(b"")  # the end
        self._process.stdout.close()


def _line(value: Any) -> bytes:
    return json.dumps(value).encode() + b"\n"


# --- the other end of the pipe ---


def _keep(name: str) -> None:
    """Do what the notebook asks until it has gone, and leave nothing of name on this host."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # whoever ends the keeper ends them all
    processes.stop_leftovers()
    folder = processes.make_folder(name)
    try:
        connection = os.environ.get("SSH_CONNECTION", "").split()
        _say([str(folder), socket.gethostname(), connection])
        for line in sys.stdin:
            number, task, *words = json.loads(line)
            _say([number, _TASKS[task](*words)])
    finally:
        processes.stop(folder)


def _say(value: Any) -> None:
    sys.stdout.buffer.write(_line(value))
    sys.stdout.buffer.flush()


def _read(file: str, offset: int) -> str:
    with contextlib.suppress(FileNotFoundError), open(file, "rb") as opened:
        opened.seek(offset)
        return opened.read().decode("latin-1")  # one character for each byte: it may end within one
    return ""


def _write(file: str, text: str) -> None:
    half_written = Path(f"{file}.new")
    half_written.touch(mode=0o600)
    half_written.write_text(text)
    half_written.replace(file)


def _remove(file: str) -> None:
    Path(file).unlink(missing_ok=True)


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _port() -> int | None:
    # Below those the system gives to outgoing connections: it is used again for each process group
    # of the ranks, and must stay free in between.
    for port in random.sample(range(20_000, 30_000), 100):
        with contextlib.suppress(OSError), socket.create_server(("", port)):
            return port
    return None


_TASKS: dict[str, Callable] = {
    "read": _read,
    "write": _write,
    "remove": _remove,
    "signal": _signal,
    "port": _port,
}


if __name__ == "__main__":
    _keep(sys.argv[1])
