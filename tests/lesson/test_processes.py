"""Processes are marked, found again, and ended with the kernel that started them."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ddp_helpers.lesson import processes

SLEEP = [sys.executable, "-c", "import time; time.sleep(100)"]

# A stand-in for a notebook's kernel: it starts one process, says where, and sleeps.
KERNEL = """
import os, sys, time
from ddp_helpers.lesson import processes
folder = processes.make_folder()
if "watched" in sys.argv:
    processes.start_watcher(folder)
command = [sys.executable, "-c", "import time; time.sleep(100)"]
child = processes.start(command, folder, "x.log", os.environ)
print(folder, flush=True)
time.sleep(100)
"""


@pytest.fixture
def kernel():
    """Start stand-in kernels; what they leave is removed after the test."""
    started = []

    def start(*arguments: str):
        process = subprocess.Popen(
            [sys.executable, "-c", KERNEL, *arguments], stdout=subprocess.PIPE, text=True
        )
        started.append((process, process.stdout.readline().strip()))
        return started[-1]

    yield start
    for process, folder in started:
        process.kill()
        process.wait()
        process.stdout.close()
        processes.stop(Path(folder))


def wait_until(condition, timeout_s: float = 15.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def test_stop_ends_every_marked_process_and_removes_the_folder():
    folder = processes.make_folder()
    children = [processes.start(SLEEP, folder, f"{i}.log", os.environ) for i in range(2)]
    assert {process.pid for process in processes.marked(folder)} == {c.pid for c in children}
    assert {c.pid for c in children} <= {p.pid for p in processes.of_kernel(os.getpid())}
    processes.stop(folder)
    assert [child.wait(timeout=0) for child in children] == [-signal.SIGTERM] * 2
    assert not folder.exists()


def test_a_process_that_ignores_sigterm_is_killed(monkeypatch):
    monkeypatch.setattr(processes, "_STOP_S", 0.5)
    folder = processes.make_folder()
    code = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        " print('ready', flush=True); time.sleep(100)"
    )
    child = processes.start([sys.executable, "-c", code], folder, "x.log", os.environ)
    assert wait_until(lambda: (folder / "x.log").read_text() == "ready\n")
    processes.stop(folder)
    assert child.wait(timeout=0) == -signal.SIGKILL


def test_leftovers_of_a_killed_kernel_are_ended_and_a_living_kernels_are_not(kernel):
    (dead, dead_folder), (_, living_folder) = kernel(), kernel()
    dead.kill()
    dead.wait()
    assert processes.marked(dead_folder)
    processes.stop_leftovers()
    assert not processes.marked(dead_folder)
    assert not os.path.exists(dead_folder)
    assert processes.marked(living_folder)


def test_a_reused_process_number_is_not_taken_for_the_kernel(kernel):
    process, folder = kernel()
    older = re.sub(rf"_{process.pid}_\d+_", f"_{process.pid}_1000000000_", folder)
    assert processes._kernel_lives(Path(folder))
    assert not processes._kernel_lives(Path(older))


def test_a_killed_kernels_processes_end_by_themselves(kernel):
    process, folder = kernel("watched")
    process.kill()
    process.wait()
    assert wait_until(lambda: not processes.marked(folder) and not os.path.exists(folder))
