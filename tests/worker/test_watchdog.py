"""A rank that waits is told where, for whom and why; a rank that fails is named by the others."""

import re
import signal

import pytest

pytestmark = pytest.mark.launcher

SCRIPT = """
import os, signal, sys, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from ddp_helpers.worker.console import short_errors
from ddp_helpers.worker.environment import detect
from ddp_helpers.worker.process_group import process_group
from ddp_helpers.worker.watchdog import PeerFailed, watchdog

def the_others_go_on():
    dist.barrier()

env = detect()
with short_errors(PeerFailed):
    with process_group(env, timeout_s=6), watchdog(env.rank, env.world_size, after_s=1):
        dist.barrier()
        if env.rank == 1:
            {fault}
        the_others_go_on()
"""


@pytest.fixture
def fail(start_ranks):
    """Run three ranks, of which rank 1 has a fault; return their ends by rank."""

    def fail(fault: str):
        return start_ranks(SCRIPT.replace("{fault}", fault), 3)

    return fail


def test_a_rank_that_raises_is_named_by_the_others_with_its_host_and_place(fail):
    ranks = fail("raise ValueError('boom')")
    assert [rank.status for rank in ranks] == [1, 1, 1]
    assert "ValueError: boom" in ranks[1].output
    for rank in (ranks[0], ranks[2]):
        found = r"error: rank 1 on \S+ \(pid \d+\) failed first: ValueError: boom \(ranks_0.py line"
        assert re.search(found, rank.output), rank.output
        assert "Traceback" not in rank.output
        assert rank.seconds < 20


@pytest.mark.parametrize(
    ("fault", "how"),
    [("sys.exit(0)", "failed first: SystemExit: 0"), ("os._exit(0)", None)],
    ids=["exit", "ends at once"],
)
def test_a_rank_that_ends_early_fails_the_others(fail, fault, how):
    ranks = fail(fault)
    assert ranks[0].status == ranks[2].status == 1
    if how:
        assert how in ranks[0].output
        assert how in ranks[2].output


def test_a_rank_that_leaves_out_a_collective_is_named(fail):
    ranks = fail("the_others_go_on = lambda: None")
    assert ranks[0].status == ranks[2].status == 1
    for rank in (ranks[0], ranks[2]):
        assert re.search(r"error: rank 1 on \S+ \(pid \d+\) has left the process", rank.output)


def test_ranks_that_wait_for_one_that_is_elsewhere_say_where_each_is(fail):
    ranks = fail("time.sleep(9)")
    assert [rank.status for rank in ranks][0::2] == [1, 1]
    for number in (0, 2):
        head = rf"\[rank {number}\] rank {number} on \S+ \(pid \d+\) has waited [1-3] s in barrier"
        assert re.search(head, ranks[number].output), ranks[number].output
        assert "ranks_0.py line 11, in the_others_go_on" in ranks[number].output
    table = ranks[0].output
    assert re.search(r"rank 1 on \S+ \(pid \d+\) is in no collective: at ranks_0.py line", table)
    assert re.search(r"rank 2 on \S+ \(pid \d+\) is in barrier\(\) at ranks_0.py line 11", table)
    assert "is in no collective" not in ranks[2].output  # one rank tells


def test_ranks_in_different_collectives_are_told_with_the_call_of_each(fail):
    ranks = fail("dist.recv(torch.ones(1), src=0)")
    assert [rank.status for rank in ranks] == [1, 1, 1]
    table = ranks[0].output
    assert re.search(r"rank 1 on \S+ \(pid \d+\) is in recv\(\) at ranks_0.py line 18", table), (
        table
    )
    assert re.search(r"rank 2 on \S+ \(pid \d+\) is in barrier\(\) at ranks_0.py line 11", table)


def test_a_rank_that_stands_still_is_named(fail):
    end = "import subprocess; subprocess.Popen(['sh', '-c', f'sleep 9; kill -9 {os.getpid()}'])"
    ranks = fail(f"{end}; os.kill(os.getpid(), signal.SIGSTOP)")
    assert ranks[1].status == -signal.SIGKILL
    assert re.search(r"rank 1 on \S+ \(pid \d+\) does not answer: it is stopped", ranks[0].output)


def test_rank_0_that_stands_still_with_its_store_is_named_and_ends_the_others(start_ranks):
    end = "import subprocess; subprocess.Popen(['sh', '-c', f'sleep 20; kill -9 {os.getpid()}'])"
    script = SCRIPT.replace("env.rank == 1", "env.rank == 0")
    fault = f"{end}; os.kill(os.getpid(), signal.SIGSTOP)"
    ranks = start_ranks(script.replace("{fault}", fault), 3)
    assert ranks[0].status == -signal.SIGKILL
    for rank in ranks[1:]:
        assert rank.status == 1
        assert "error: rank 0 does not answer: it is stopped, or its node has gone" in rank.output
        assert "s in barrier():" in rank.output  # told before the timeout of 6 s
        assert rank.seconds < 18


def test_ranks_that_wait_in_ddps_backward_are_told_so(fail):
    ranks = fail(
        "time.sleep(9)\n"
        "        model = DistributedDataParallel(torch.nn.Linear(1, 1), init_sync=False)\n"
        "        model(torch.ones(1)).backward()"
    )
    assert "s in backward(), where DDP exchanges gradients:" in ranks[0].output, ranks[0].output


def test_a_rank_that_computes_for_long_is_left_in_peace(start_ranks):
    script = SCRIPT.replace("{fault}", "pass")
    ranks = start_ranks(script.replace("  the_others", "  time.sleep(3); the_others"), 2)
    assert [rank.status for rank in ranks] == [0, 0]
    assert [rank.output for rank in ranks] == ["", ""]


def test_one_rank_alone_is_watched_too(start_ranks):
    [rank] = start_ranks(SCRIPT.replace("{fault}", "pass"), 1)
    assert (rank.status, rank.output) == (0, "")
