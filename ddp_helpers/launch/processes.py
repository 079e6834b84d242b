"""Start a job's processes, hand on what they write, and end every one of them.

Lesson: notebooks/08_when_it_hangs.ipynb
"""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from .child_environ import child_environ
from .commands import HostCommand
from .guard import guarded
from .output import Line, LineReader, label_variables, with_labels
from .remote import is_this_machine, over_ssh

_GRACE_S = 10.0  # between SIGTERM and SIGKILL; longer than the far side's in remote.py

Take = Callable[[Line], None]  # what to do with a line of output


@contextlib.contextmanager
def started(
    commands: Sequence[HostCommand], environ: Mapping[str, str], log_dir: str, take: Take
) -> Iterator[tuple[list[subprocess.Popen], selectors.BaseSelector]]:
    """Start commands; yield their processes and output pipes; end all processes on the way out."""
    job_id = uuid.uuid4().hex
    processes: list[subprocess.Popen] = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(guarded(__name__, job_id, log_dir))
        pipes = stack.enter_context(selectors.DefaultSelector())
        try:
            for number, command in enumerate(commands):
                here = is_this_machine(command.host)
                own_log_dir = f"{log_dir}/{number}"
                inherited = child_environ(environ, job_id, command.argv[0] == "srun")
                inherited |= label_variables(own_log_dir)
                labelled = replace(command, argv=with_labels(command))
                if not here:
                    labelled = over_ssh(labelled, job_id, own_log_dir, inherited)
                process = subprocess.Popen(
                    labelled.argv,
                    env={**inherited, **dict(labelled.env)},
                    stdin=subprocess.DEVNULL if here else subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # Ctrl-C reaches this process alone, which stops all
                )
                processes.append(process)
                stack.enter_context(process.stdout)
                pipes.register(process.stdout, selectors.EVENT_READ, LineReader(command, number))
            yield processes, pipes
        finally:
            _stop(processes, pipes, job_id, take)


def watch(
    processes: list[subprocess.Popen], pipes: selectors.BaseSelector, deadline: float, take: Take
) -> list[int | None]:
    """Wait until all have ended, one has failed, or the deadline; return the exit codes so far."""

    def over() -> bool:
        codes = _codes(processes)
        return any(codes) or None not in codes

    _hand_on(pipes, take, over, deadline)
    return _codes(processes)


def _codes(processes: list[subprocess.Popen]) -> list[int | None]:
    return [process.poll() for process in processes]


def _hand_on(
    pipes: selectors.BaseSelector, take: Take, over: Callable[[], bool], deadline: float
) -> None:
    """Hand the output on, line by line, as it comes, until over() or the deadline."""
    while not over() and time.monotonic() < deadline:
        for key, _ in pipes.select(timeout=0.05):
            data = os.read(key.fd, 65536)
            for line in key.data.feed(data) if data else key.data.end():
                take(line)
            if not data:
                pipes.unregister(key.fileobj)


def _stop(
    processes: list[subprocess.Popen], pipes: selectors.BaseSelector, job_id: str, take: Take
) -> None:
    """End every process of the job: politely, then those that are left."""
    try:
        for process in processes:
            if process.stdin:  # over ssh: the far side stops the launcher there
                process.stdin.close()
            elif process.poll() is None:
                # SIGTERM, not SIGKILL: a launcher that is killed leaves its workers running.
                process.terminate()
        polite = time.monotonic() + _GRACE_S
        _hand_on(pipes, take, lambda: None not in _codes(processes), polite)
    finally:  # also when Ctrl-C comes a second time
        _kill(processes, job_id)
    _hand_on(pipes, take, lambda: not pipes.get_map(), time.monotonic() + 2)


def _kill(processes: list[subprocess.Popen], job_id: str) -> None:
    """End what is left of the job with SIGKILL, and wait until it has ended."""
    for process in processes:
        process.kill()  # does nothing when it has ended
        if not Path("/proc/self/environ").exists():  # then its group is all that can be found
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
    deadline = time.monotonic() + 5  # a process that is stuck in the kernel does not end at all
    while (left := processes_of(job_id)) and time.monotonic() < deadline:
        for process_id in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process_id, signal.SIGKILL)
        time.sleep(0.02)
    for process in processes:
        process.wait(timeout=5)


def processes_of(job_id: str) -> list[int]:
    """Return the ids of the processes that job_id marks; none on a system without /proc."""
    found = []
    for directory in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # ended meanwhile, or another user's
            if job_id.encode() in (directory / "environ").read_bytes():
                found.append(int(directory.name))
    return found


def _end_unattended(job_id: str, log_dir: str) -> None:
    """In the guard: end the job of a process that was killed, and remove its folder."""
    for process_id in processes_of(job_id):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process_id, signal.SIGTERM)
    deadline = time.monotonic() + _GRACE_S
    while processes_of(job_id) and time.monotonic() < deadline:
        time.sleep(0.05)
    _kill([], job_id)
    shutil.rmtree(log_dir, ignore_errors=True)


@contextlib.contextmanager
def signals_end_the_block() -> Iterator[None]:
    """Let SIGTERM and SIGHUP leave the with block by SystemExit, so that finally clauses run.

    Handlers that somebody else has set stay, and outside the main thread nothing changes.
    """

    def leave(number, frame):
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [signal.SIGTERM, signal.SIGHUP]
    unset = [number for number in numbers if signal.getsignal(number) is signal.SIG_DFL]
    for number in unset:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number in unset:
            signal.signal(number, signal.SIG_DFL)


if __name__ == "__main__":
    sys.stdin.buffer.read()  # returns when the process that started the job has gone
    _end_unattended(*sys.argv[1:])
