import os
import signal

import pytest
import torch

from ddp_helpers.worker.stop import STOPPED, stop_notice

CPU = torch.device("cpu")
launcher = pytest.mark.launcher


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1], ids=lambda n: n.name)
def test_a_process_alone_stops_after_the_step_in_which_it_was_told(number):
    with stop_notice(CPU) as stop_now:
        assert not stop_now()
        os.kill(os.getpid(), number)
        assert stop_now()


def test_the_handlers_that_were_there_come_back():
    told = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
    wakeup = signal.set_wakeup_fd(-1)
    try:
        with stop_notice(CPU):
            os.kill(os.getpid(), signal.SIGTERM)
        assert told == []
        os.kill(os.getpid(), signal.SIGTERM)
        assert told == [signal.SIGTERM]
        assert signal.set_wakeup_fd(-1) == -1
    finally:
        signal.signal(signal.SIGTERM, before)
        signal.set_wakeup_fd(wakeup)


def test_the_status_is_that_of_a_process_that_sigterm_has_ended():
    assert STOPPED == 143


@launcher
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("told", ["one_is_told", "all_are_told"])
def test_all_ranks_stop_after_the_same_step_at_most_two_later(worlds, told, world_size):
    steps = worlds(told, world_size)
    assert len(set(steps)) == 1
    assert 5 <= steps[0] <= 8  # told in step 5, or 6 where the rank is odd


@launcher
def test_no_rank_stops_when_none_is_told(worlds):
    assert worlds("none_is_told", 2) == [None, None]


# Rank 0 waits for rank 1 and is told to stop: Python cannot run its handler before rank 1 comes.
DEAF = """
import os, signal, threading, time
import torch, torch.distributed as dist
from ddp_helpers.worker.environment import detect
from ddp_helpers.worker.process_group import process_group
from ddp_helpers.worker.stop import stop_notice
env = detect()
with process_group(env, "gloo", timeout_s=60) as device, stop_notice(device, grace_s=1) as stop_now:
    if env.rank == 1:
        time.sleep(300)
    began = time.monotonic()
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
    try:
        dist.all_reduce(torch.ones(1))
    finally:
        print("the collective ended")
"""


@launcher
def test_a_rank_that_hangs_in_a_collective_ends_soon_after_the_signal(start_ranks):
    code = DEAF.replace("sleep(300)", "sleep(5); os._exit(0)")
    rank_0, _ = start_ranks(code, 2)
    assert (rank_0.status, rank_0.output) == (STOPPED, "")


# Rank 0 stands still, and the store with it: the question after a step gets no answer.
SILENT = """
import os, signal, subprocess
import torch, torch.distributed as dist
from ddp_helpers.worker import stop
from ddp_helpers.worker.environment import detect
from ddp_helpers.worker.process_group import process_group
stop._ANSWER_S = 2
env = detect()
with process_group(env, "gloo", 60) as device, stop.stop_notice(device) as stop_now:
    dist.all_reduce(torch.ones(1))
    if env.rank == 0:
        subprocess.Popen(["sh", "-c", f"sleep 9; kill -9 {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
    while not stop_now():
        pass
"""


@launcher
def test_a_rank_does_not_wait_for_ever_for_a_rank_0_that_stands_still(start_ranks):
    _, rank_1 = start_ranks(SILENT, 2)
    assert rank_1.status == 1
    assert "rank 0 is stopped, or its node has gone" in rank_1.output
    assert rank_1.seconds < 8.5  # before the end of rank 0
