import os
import socket

import pytest
import torch
import torch.distributed as dist

from ddp_helpers.worker.environment import LaunchEnvironment, LaunchEnvironmentError
from ddp_helpers.worker.process_group import process_group
from ddp_helpers.worker.rendezvous import RendezvousError, check_master, check_port

launcher = pytest.mark.launcher

ALL_REDUCE = """
import sys, torch, torch.distributed as dist
from dataclasses import replace
from ddp_helpers.worker.console import short_errors
from ddp_helpers.worker.environment import LaunchEnvironmentError, detect
from ddp_helpers.worker.process_group import process_group
from ddp_helpers.worker.rendezvous import RendezvousError
with short_errors(LaunchEnvironmentError, RendezvousError):
    env = detect()
    for group in range(int(sys.argv[1])):
        with process_group(env, timeout_s=float(sys.argv[2])) as device:
            total = torch.tensor([env.rank + 1.0], device=device)
            dist.all_reduce(total)
        print(f"group {group}: {total.item():g}")
"""


def by_hand(rank, world_size, port, **changes):
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        **changes,
    }


def test_without_a_launcher_there_is_a_group_of_one_and_it_is_destroyed():
    with process_group(LaunchEnvironment("python"), "gloo") as device:
        assert dist.is_initialized()
        total = torch.ones(1, device=device)
        dist.all_reduce(total)
        assert total.item() == 1
    assert not dist.is_initialized()


@pytest.mark.parametrize("error", [ValueError("body"), SystemExit(3)])
def test_B45_the_group_is_destroyed_and_the_error_kept_when_the_body_raises(error):
    """https://github.com/pytorch/pytorch/issues/126275: warnings of groups not destroyed."""
    with (
        pytest.raises(type(error)) as caught,
        process_group(LaunchEnvironment("python"), "gloo"),
    ):
        raise error
    assert caught.value is error
    assert not dist.is_initialized()


def test_a_second_group_inside_the_first_is_refused():
    with (
        process_group(LaunchEnvironment("python"), "gloo"),
        pytest.raises(RendezvousError, match="already has a process group"),
        process_group(LaunchEnvironment("python"), "gloo"),
    ):
        pass
    assert not dist.is_initialized()


def test_an_interface_the_user_chose_is_kept_and_ours_is_taken_back(monkeypatch):
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "mine")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    with process_group(LaunchEnvironment("python"), "gloo"):
        assert os.environ["NCCL_SOCKET_IFNAME"] == "mine"
        assert os.environ["GLOO_SOCKET_IFNAME"] in ("lo", "lo0")
    assert "GLOO_SOCKET_IFNAME" not in os.environ


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_B38_nccl_without_cuda_says_so_at_once():
    """https://github.com/pytorch/pytorch/issues/100243: device_ids for a model on the CPU."""
    with (
        pytest.raises(LaunchEnvironmentError, match="nccl needs a CUDA device.*use gloo"),
        process_group(LaunchEnvironment("python"), "nccl"),
    ):
        pass


def test_an_unknown_backend_is_refused():
    with (
        pytest.raises(LaunchEnvironmentError, match="'mpi', expected 'gloo' or 'nccl'"),
        process_group(LaunchEnvironment("python"), "mpi"),
    ):
        pass


TWO_NODES = {"world_size": 2, "local_world_size": 1}


@pytest.mark.parametrize(
    ("env", "message"),
    [
        pytest.param(
            LaunchEnvironment("Open MPI", **TWO_NODES),
            "-x MASTER_ADDR=<first host> -x MASTER_PORT=29500",
            id="no master under mpirun",
        ),
        pytest.param(
            LaunchEnvironment("hydra", **TWO_NODES),
            "-genv MASTER_ADDR <first host>",
            id="no master under hydra",
        ),
        pytest.param(
            LaunchEnvironment("environment", 1, 2, 0, 1, None, "localhost", 29500),
            "localhost is (127.0.0.1|::1), a loopback address, but the job spans nodes",
            id="loopback master",
        ),
        pytest.param(
            LaunchEnvironment("environment", 0, 2, 0, 1, None, "no-such-host.invalid", 29500),
            "no-such-host.invalid does not resolve on",
            id="a name that does not resolve",
        ),
        pytest.param(
            LaunchEnvironment("environment", 0, 2, 0, 1, None, "203.0.113.7", 29500),
            r"MASTER_ADDR=203.0.113.7 \(203.0.113.7\) is no address of .*\nSet MASTER_ADDR to one",
            id="a master that is not rank 0's node",
        ),
    ],
)
def test_a_master_that_cannot_work_is_refused_before_waiting(env, message):
    with pytest.raises(LaunchEnvironmentError, match=message) as caught:
        check_master(env)
    assert len(str(caught.value).splitlines()) <= 3


@pytest.mark.parametrize(
    ("rank", "ending"), [(0, "; this node has: 10.0.0.1."), (1, ": rank 0 lists them.")]
)
def test_only_rank_0_offers_its_addresses_and_none_that_others_cannot_use(
    monkeypatch, rank, ending
):
    own = [("lo", "127.0.0.1"), ("eth0", "10.0.0.1"), ("eth0", "fe80::1")]
    monkeypatch.setattr("ddp_helpers.worker.network.own_addresses", lambda: own)
    with pytest.raises(LaunchEnvironmentError) as caught:
        check_master(LaunchEnvironment("Open MPI", rank, 2, 0, 1, None, "127.0.0.1", 29500))
    assert str(caught.value).endswith(f"an address of rank 0's node{ending}")


def test_a_loopback_master_is_right_for_one_node():
    env = LaunchEnvironment("environment", 1, 2, 1, 2, None, "localhost", 29500)
    assert check_master(env) in ("lo", "lo0", None)


def test_B19_a_port_in_use_is_named_with_its_owner():
    """https://github.com/meta-pytorch/torchtune/issues/1025: a second job on one machine."""
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(LaunchEnvironmentError, match=f"^MASTER_PORT={port} is in use on .*"):
            check_port(port)
    check_port(port)


@launcher
def test_B04_a_local_rank_given_as_the_rank_is_refused_at_once(start_ranks, free_port):
    """https://github.com/pytorch/pytorch/issues/23074: ranks 0, 1, 0, 1 wait for 2 and 3."""
    environments = [
        by_hand(rank, 4, free_port, LOCAL_RANK=str(rank % 2), LOCAL_WORLD_SIZE="2")
        for rank in (2, 3)
    ]
    mistaken = ALL_REDUCE.replace(
        "env = detect()", "env = detect(); env = replace(env, rank=env.local_rank)"
    )
    for rank, finished in zip((2, 3), start_ranks(mistaken, environments, "1", "10"), strict=True):
        assert finished.status == 1
        assert finished.output.startswith(
            f"error: rank {rank % 2} (this is the local rank) was given, but this process was"
            f" started as rank {rank} of 4.\n"
        )
        assert finished.seconds < 8


@launcher
def test_groups_can_follow_each_other_on_one_port(start_ranks):
    for finished in start_ranks(ALL_REDUCE, 3, "4", "30"):
        assert finished.status == 0, finished.output
        assert finished.output == "".join(f"group {group}: 6\n" for group in range(4))


@launcher
def test_a_rank_0_that_stands_still_while_the_ranks_meet_is_named_in_time(start_ranks):
    stands_still = """
import os, signal, subprocess
from ddp_helpers.worker import rendezvous
def stand_still(env, store, deadline):
    rendezvous._wait(store, ["rank 1", "rank 2"], deadline)
    subprocess.Popen(["sh", "-c", f"sleep 9; kill -9 {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)
rendezvous._count_ranks = stand_still
"""
    _, *others = start_ranks(stands_still + ALL_REDUCE, 3, "1", "2")
    for rank in others:
        assert rank.status == 1
        assert "rank 0's store does not answer any more.\nRank 0 is stopped" in rank.output
        assert rank.seconds < 8.5  # before the end of rank 0


@launcher
def test_a_rank_that_leaves_at_once_does_not_break_one_that_still_connects(start_ranks):
    # Rank 1's connection phase is held up; without a wait on leaving, rank 0 would be gone by then.
    code = """
import time, torch.distributed as dist
from ddp_helpers.worker.environment import detect
from ddp_helpers.worker import process_group as module
env = detect()
if env.rank == 1:
    late = module.say_connected
    module.say_connected = lambda *args: (time.sleep(1), late(*args))
with module.process_group(env, timeout_s=60):
    met = time.monotonic()
left = time.monotonic() - met
print("waited" if left > 0.5 else "left at once")
"""
    first, second = start_ranks(code, 2)
    assert (first.status, first.output) == (0, "waited\n")
    assert (second.status, second.output) == (0, "left at once\n")


@launcher
def test_torchs_debug_mode_names_shapes_that_differ_on_every_rank(start_ranks, free_port):
    code = """
import torch, torch.distributed as dist
from ddp_helpers.worker.environment import detect
from ddp_helpers.worker.process_group import process_group
dist.set_debug_level_from_env()  # as import torch does it
env = detect()
with process_group(env, timeout_s=20):
    dist.all_reduce(torch.ones(1 + env.rank))
"""
    debug = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
    for rank in start_ranks(code, [by_hand(rank, 2, free_port, **debug) for rank in (0, 1)]):
        assert rank.status == 1
        assert "Detected mismatch between collectives" in rank.output
        assert "TensorShape=[1]" in rank.output
        assert "TensorShape=[2]" in rank.output


@launcher
def test_a_rank_that_never_starts_is_named_on_every_other(start_ranks, free_port):
    environments = [by_hand(rank, 3, free_port) for rank in (0, 2)]
    for finished in start_ranks(ALL_REDUCE, environments, "1", "3"):
        assert finished.status == 1
        assert "2 of 3 ranks came in time; missing: rank 1." in finished.output
        assert "Traceback" not in finished.output


@launcher
@pytest.mark.parametrize("alone", [0, 1])
def test_after_a_rank_has_waited_for_a_group_alone_the_next_one_holds_all(start_ranks, alone):
    code = """
import sys, time
from pathlib import Path
from ddp_helpers.worker.environment import detect
from ddp_helpers.worker.process_group import process_group
from ddp_helpers.worker.rendezvous import RendezvousError
env = detect()
tried = Path("tried")
for turn in range(3):
    if turn == 1 and env.rank != int(sys.argv[1]):
        continue
    while turn == 2 and not tried.exists():
        time.sleep(0.01)
    try:
        with process_group(env, timeout_s=0.5 if turn == 1 else 30):
            print("met")
    except RendezvousError as error:
        print(error)
        tried.touch()
"""
    ranks = start_ranks(code, 2, str(alone))
    assert ranks[1 - alone].output == "met\nmet\n"
    met, *missing, again = ranks[alone].output.splitlines()
    assert met == again == "met"
    named = {0: "1 of 2 ranks came in time; missing: rank 1.", 1: "rank 1: rank 0 did not come"}
    assert missing[0].startswith(named[alone])


@launcher
def test_without_rank_0_the_others_say_where_they_looked(start_ranks, free_port):
    (finished,) = start_ranks(ALL_REDUCE, [by_hand(1, 2, free_port)], "1", "2")
    assert finished.status == 1
    assert f"rank 1: no store at 127.0.0.1:{free_port}: connection refused" in finished.output
    assert "Is rank 0 started" in finished.output


@launcher
def test_a_port_where_another_program_answers_nothing_is_given_up_in_time(start_ranks):
    with socket.create_server(("127.0.0.1", 0)) as other:  # takes connections, and no more
        ranks = [by_hand(1, 2, other.getsockname()[1])]
        [rank] = start_ranks(ALL_REDUCE, ranks, "1", "3")
    assert rank.status == 1
    assert "does not answer as a store does" in rank.output
    assert rank.seconds < 3 + 5 + 5  # the last 5 to start


def test_a_rank_started_twice_is_named(start_ranks, free_port):
    environments = [by_hand(rank, 3, free_port) for rank in (0, 1, 1)]
    texts = [finished.output for finished in start_ranks(ALL_REDUCE, environments, "1", "4")]
    assert any("rank 1 was started twice: pid" in text for text in texts)
    assert all("error: " in text for text in texts)


@launcher
def test_different_world_sizes_are_named_on_both_sides(start_ranks, free_port):
    environments = [by_hand(0, 2, free_port), by_hand(1, 3, free_port)]
    for finished in start_ranks(ALL_REDUCE, environments, "1", "20"):
        assert finished.status == 1
        assert finished.seconds < 15
        assert "world size of 3, rank 0 with 2" in finished.output
