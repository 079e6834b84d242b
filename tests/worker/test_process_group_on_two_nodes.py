"""process_group on two real nodes: what cannot work ends on every rank in time, and says why."""

import os
import re
import subprocess

import pytest

from ddp_helpers.launch.commands import Job, torchrun
from ddp_helpers.launch.practice_cluster import on_node, practice_cluster

pytestmark = pytest.mark.launcher

TIMEOUT_S = 4
SUM = f"""
import torch, torch.distributed as dist
from ddp_helpers.worker.console import short_errors
from ddp_helpers.worker.environment import LaunchEnvironmentError, detect
from ddp_helpers.worker.process_group import process_group
from ddp_helpers.worker.rendezvous import RendezvousError
with short_errors(LaunchEnvironmentError, RendezvousError):
    with process_group(detect(), timeout_s={TIMEOUT_S}):
        total = torch.ones(1)
        dist.all_reduce(total)
    print(f"{{total.item():g}} ranks")
"""
BOTH = [("node1", 0, {}), ("node2", 1, {})]


def both(**changes: str | None) -> list[tuple[str, int, dict]]:
    return [(node, rank, changes) for node, rank, _ in BOTH]


@pytest.fixture
def sum_up(start_ranks_on_nodes):
    """Run SUM in ranks; all must end in time, in one short message or well; return their texts."""

    def sum_up(ranks, status=1) -> list[str]:
        ended = start_ranks_on_nodes(SUM, ranks)
        for rank in ended:
            assert rank.status == status, rank.output
            assert rank.seconds < TIMEOUT_S + 5 + 3  # 3: to begin, on a busy machine
            assert "Traceback" not in rank.output
            assert len(re.sub(r"(?m)^\[.*\n", "", rank.output).splitlines()) <= 3
        return [rank.output for rank in ended]

    return sum_up


def test_two_ranks_on_two_nodes_meet(sum_up):
    assert sum_up(BOTH, status=0) == ["2 ranks\n"] * 2


def test_a_rank_that_never_starts_is_named(sum_up):
    [text] = sum_up(BOTH[:1])
    assert "1 of 2 ranks came in time; missing: rank 1." in text


def test_a_rank_that_is_started_twice_is_named_with_both_places(sum_up):
    first, *twice = sum_up([*both(WORLD_SIZE="3"), ("node1", 1, {"WORLD_SIZE": "3"})])
    assert "2 of 3 ranks came in time; missing: rank 2." in first
    places = r"rank 1 was started twice: pid \d+ on node[12], and pid \d+ on node[12]\."
    assert any(re.search(places, text) for text in twice)


def test_world_sizes_that_differ_are_named_on_both_nodes(sum_up):
    for text in sum_up([BOTH[0], ("node2", 1, {"WORLD_SIZE": "3"})]):
        assert re.search(r"rank 1 \(pid \d+ on node2\) was started with a world size of 3", text)


def test_B11_a_loopback_master_is_refused_before_waiting(sum_up, cluster):
    """https://github.com/pytorch/pytorch/issues/76069: each node waits for itself, for hours."""
    first, second = sum_up(both(MASTER_ADDR="localhost"))
    for text in (first, second):
        assert "MASTER_ADDR=localhost is 127.0.0.1, a loopback address" in text
    remedy = "Set MASTER_ADDR to an address of rank 0's node"
    assert f"{remedy}; this node has: {cluster.nodes[0].address}." in first
    assert f"{remedy}: rank 0 lists them." in second
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    open_mpi = dict.fromkeys(names)
    open_mpi |= {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
    open_mpi |= {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    [text] = sum_up([("node2", 1, open_mpi)])
    assert "MASTER_ADDR and MASTER_PORT not set" in text
    assert "With mpirun add: -x MASTER_ADDR=<first host> -x MASTER_PORT=29500" in text


def test_B14_hosts_files_that_say_127_0_1_1_are_no_hindrance(real_nodes, tmp_path):
    """https://github.com/pytorch/pytorch/issues/15592: gloo connects to 127.0.1.1."""
    script = tmp_path / "sum.py"
    script.write_text(SUM)
    with practice_cluster(f"debian-{os.getpid()}") as cluster:
        for node in cluster.nodes:
            hosts = cluster.folder / f"{node.name}.hosts"
            hosts.write_text(f"127.0.1.1 {node.name}\n{hosts.read_text()}")
        agents = [
            subprocess.Popen(
                on_node(cluster, command.host, command.argv),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            for command in torchrun(Job(str(script), hosts=cluster.hosts(1)))
        ]
        texts = [agent.communicate(timeout=60)[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], texts
    assert texts == ["2 ranks\n"] * 2


def test_an_interface_that_is_not_there_is_named_and_the_other_node_does_not_wait(sum_up):
    first, second = sum_up([BOTH[0], ("node2", 1, {"GLOO_SOCKET_IFNAME": "ib7"})])
    assert "gloo could not connect them" in first
    assert "find address for: ib7" in second
    assert "GLOO_SOCKET_IFNAME=ib7: it must be, on each node, the interface" in second


def test_an_interface_of_the_users_that_leads_nowhere_is_kept_and_named(sum_up):
    for text in sum_up(both(GLOO_SOCKET_IFNAME="lo")):
        assert "gloo could not connect them" in text
        assert "GLOO_SOCKET_IFNAME=lo: it must be, on each node, the interface" in text


def test_where_only_the_masters_port_is_open_that_is_said(sum_up, firewall, cluster, free_port):
    first, second = cluster.nodes
    firewall(first, second, f"sport {free_port}")
    firewall(second, first, f"dport {free_port}")
    for text in sum_up(BOTH):
        assert "met the other ranks at the master, but gloo could not connect them" in text
        assert "GLOO_SOCKET_IFNAME=eth0" in text


def test_B20_a_master_that_is_not_rank_0s_node_is_refused_and_nothing_listens_there(sum_up):
    """https://github.com/pytorch/pytorch/issues/49084: an address that belongs to no node."""
    network = r"10\.77\.\d+"
    for master in ("node2", "10.77.250.250"):
        first, second = sum_up(both(MASTER_ADDR=master))
        assert re.search(rf"MASTER_ADDR={master} \({network}\.\d+\) is no address of node1", first)
        assert re.search(rf"Set MASTER_ADDR to one of: {network}\.1\.", first)
        assert re.search(rf"rank 1: no store at {master}:\d+: ", second)
        assert "Is rank 0 started on that node" in second
