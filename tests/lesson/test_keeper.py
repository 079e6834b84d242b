"""A keeper does what the notebook asks, notices that it has gone, and leaves nothing."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from ddp_helpers.lesson import keeper as module
from ddp_helpers.lesson import processes
from ddp_helpers.lesson.keeper import Keeper

# A stand-in for a notebook's kernel: it starts one process, says where, and sleeps.
KERNEL = """
import os, sys, time
from pathlib import Path
from ddp_helpers.lesson import processes
from ddp_helpers.lesson.keeper import Keeper
keeper = Keeper(processes.new_name())
keeper.greet(30)
command = [sys.executable, "-c", "import time; time.sleep(100)"]
child = processes.start(command, Path(keeper.folder), "x.log", os.environ)
print(keeper.folder, flush=True)
time.sleep(100)
"""


@pytest.fixture
def keeper():
    keeper = Keeper(processes.new_name())
    keeper.greet(30)
    yield keeper
    keeper.stop()
    assert not processes.of_kernel(os.getpid())
    assert not os.path.exists(keeper.folder)


@pytest.fixture
def kernel(wait_until):
    """Start stand-in kernels: (process, its folder); what they leave is removed after the test."""
    started = []

    def start():
        process = subprocess.Popen(
            [sys.executable, "-c", KERNEL], stdout=subprocess.PIPE, text=True
        )
        started.append((process, Path(process.stdout.readline().strip())))
        return started[-1]

    yield start
    for process, folder in started:
        process.kill()
        process.wait()
        process.stdout.close()
        wait_until(lambda: not left_of(folder))  # noqa: B023 (called at once)


def left_of(folder: Path) -> list:
    name = processes.name_of(folder)
    left = [process for process, kept in processes._keepers() if kept == name]
    return [*left, *processes.marked(name), *([folder] if folder.exists() else [])]


@pytest.fixture
def end_keeper(wait_until):
    def end_keeper(folder: Path, number: int) -> None:
        name = processes.name_of(folder)
        [keeper] = [process for process, kept in processes._keepers() if kept == name]
        keeper.send_signal(number)
        wait_until(lambda: keeper.status() == psutil.STATUS_ZOMBIE)  # its kernel does not look

    return end_keeper


def test_files_are_written_privately_read_from_anywhere_and_removed(keeper):
    file = f"{keeper.folder}/file"
    assert keeper.read(file) == b""
    keeper.write(file, "a\nb\n")
    assert os.stat(file).st_mode & 0o777 == 0o600
    Path(file).write_bytes("é\n".encode() + bytes(range(256)))
    assert keeper.read(file, 1) == "é\n".encode()[1:] + bytes(range(256))
    keeper.remove(file)
    keeper.remove(file)
    assert os.listdir(keeper.folder) == []


def test_a_signal_reaches_a_process_and_one_that_has_ended_is_no_error(keeper):
    child = subprocess.Popen(["sleep", "100"])
    keeper.signal(child.pid, signal.SIGINT)
    assert child.wait(timeout=10) == -signal.SIGINT
    keeper.signal(child.pid, signal.SIGINT)
    assert not keeper.is_lost()


def test_a_question_that_was_interrupted_does_not_disturb_the_next(keeper):
    keeper.write(f"{keeper.folder}/a", "a")
    os.kill(keeper._process.pid, signal.SIGSTOP)
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        keeper.read(f"{keeper.folder}/a")
    os.kill(keeper._process.pid, signal.SIGCONT)
    assert keeper.read(f"{keeper.folder}/none") == b""
    assert keeper.read(f"{keeper.folder}/a") == b"a"


def test_a_keeper_that_does_not_answer_is_lost_and_asked_no_more(keeper, monkeypatch):
    monkeypatch.setattr(module, "_ANSWER_S", 0.3)
    os.kill(keeper._process.pid, signal.SIGSTOP)
    assert keeper.read("/etc/hostname") == b""
    assert keeper.is_lost()
    os.kill(keeper._process.pid, signal.SIGCONT)
    assert keeper.free_port() is None


def test_a_host_that_is_not_there_is_told_in_ssh_s_words():
    keeper = Keeper(processes.new_name(), "no-such-host.invalid")
    with pytest.raises(RuntimeError, match="Could not resolve hostname no-such-host.invalid"):
        keeper.greet(30)


def test_a_killed_kernels_processes_end_by_themselves(kernel, wait_until):
    process, folder = kernel()
    process.kill()
    process.wait()
    wait_until(lambda: not left_of(folder))


def test_a_keeper_that_is_asked_to_end_ends_what_it_keeps(kernel, end_keeper):
    _, folder = kernel()
    end_keeper(folder, signal.SIGTERM)
    assert not left_of(folder)


def test_leftovers_without_a_keeper_are_ended_and_others_are_not(kernel, end_keeper):
    (_, kept), (_, dead) = kernel(), kernel()
    end_keeper(dead, signal.SIGKILL)
    assert left_of(dead)
    processes.stop_leftovers()
    assert not left_of(dead)
    assert len(left_of(kept)) == 3  # keeper, child, folder
