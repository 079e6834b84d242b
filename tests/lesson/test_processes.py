"""Processes are marked, found again, and ended."""

import os
import signal
import sys

import pytest

from ddp_helpers.lesson import processes

SLEEP = [sys.executable, "-c", "import time; time.sleep(100)"]


@pytest.fixture
def folder():
    """A folder of this process for marked processes; whatever carries its name ends."""
    folder = processes.make_folder(processes.new_name())
    yield folder
    processes.stop(folder)


def test_a_folder_is_private_and_says_whose_it_is(folder):
    assert folder.stat().st_mode & 0o777 == 0o700
    assert processes.name_of(folder).startswith(f"ddp_helpers_engines_{os.getpid()}_")


def test_stop_ends_every_marked_process_and_removes_the_folder(folder):
    children = [processes.start(SLEEP, folder, f"{i}.log", os.environ) for i in range(2)]
    pids = {child.pid for child in children}
    assert {process.pid for process in processes.marked(processes.name_of(folder))} == pids
    assert pids <= {process.pid for process in processes.of_kernel(os.getpid())}
    processes.stop(folder)
    assert [child.wait(timeout=0) for child in children] == [-signal.SIGTERM] * 2
    assert not folder.exists()


def test_a_process_that_ignores_sigterm_is_killed(folder, monkeypatch, wait_until):
    monkeypatch.setattr(processes, "_STOP_S", 0.5)
    code = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        " print('ready', flush=True); time.sleep(100)"
    )
    child = processes.start([sys.executable, "-c", code], folder, "x.log", os.environ)
    wait_until(lambda: (folder / "x.log").read_text() == "ready\n")
    processes.stop(folder)
    assert child.wait(timeout=0) == -signal.SIGKILL


def test_another_hosts_folder_in_a_shared_place_is_left_alone(folder):
    other = folder.rename(folder.with_suffix(".another-host"))
    processes.stop_leftovers()
    assert other.exists()
    other.rmdir()
