"""%%px cells on two real nodes: the same as on one machine, and nothing left on either."""

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from ddp_helpers.launch import namespaces
from ddp_helpers.launch.hosts import Host, parse_hosts
from ddp_helpers.launch.practice_cluster import on_node, practice_cluster
from ddp_helpers.lesson import processes
from ddp_helpers.lesson.cell import RanksFailed
from ddp_helpers.lesson.engines import EnginesNotStarted, start_engines
from ddp_helpers.lesson.report import GO_ON

pytestmark = pytest.mark.launcher


@pytest.fixture(scope="module")
def cluster(real_nodes):
    """Two nodes that this machine's mpirun knows by name."""
    with practice_cluster() as cluster, pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", cluster.environ()["PATH"])
        yield cluster
        for node in cluster.nodes:
            command = on_node(cluster, node.name, ["ls", "-A", "/run/tmp"])
            assert subprocess.run(command, capture_output=True, check=True).stdout == b""


@pytest.fixture(scope="module")
def ranks(cluster):
    """Four ranks, two on each node."""
    engines = start_engines(hosts=cluster.hosts(2))
    yield engines
    engines.stop()
    assert not processes.of_kernel(os.getpid())


def test_four_ranks_on_two_nodes_know_their_places(engines, run):
    assert repr(engines) == "<4 MPI ranks on node1, node2, Open MPI>"
    text = run("""
    import socket
    from ddp_helpers.worker.environment import detect
    env = detect()
    print(socket.gethostname(), env.local_rank, env.rank == mpi_rank)
    """)
    assert text == (
        "[rank 0] node1 0 True\n[rank 1] node1 1 True\n"
        "[rank 2] node2 0 True\n[rank 3] node2 1 True\n"
    )


def test_torch_distributed_works_across_the_nodes_by_itself_and_by_ours(run):
    text = run("""
    import torch, torch.distributed as dist
    from ddp_helpers.worker.environment import detect
    from ddp_helpers.worker.process_group import process_group
    dist.init_process_group("gloo", rank=mpi_rank, world_size=mpi_size)
    number = torch.tensor([mpi_rank])
    dist.all_reduce(number)
    dist.destroy_process_group()
    with process_group(detect()):
        dist.all_reduce(number)
    print(number.item())
    """)
    assert text == "".join(f"[rank {rank}] 24\n" for rank in range(4))


def test_a_rank_that_raises_on_the_other_node_is_told_as_on_one_machine(run):
    began = time.monotonic()
    text = run("""
    print("before")
    if mpi_rank == 2:
        raise ValueError("boom")
    MPI.COMM_WORLD.Barrier()
    """)
    assert time.monotonic() - began < 10
    assert text == (
        "".join(f"[rank {rank}] before\n" for rank in range(4)) + "rank 2 raised ValueError: boom\n"
        '    line 4 of the cell: raise ValueError("boom")\n'
        "ranks 0, 1, 3 are still waiting at\n"
        "    line 5 of the cell: MPI.COMM_WORLD.Barrier()\n"
        f"{GO_ON}"
    )


def test_a_rank_that_runs_python_on_the_other_node_is_stopped_at_the_deadline(run):
    text = run("import time\nif mpi_rank == 3: time.sleep(100)", timeout_s=1)
    assert text == (
        "the cell did not end within 1 s\n"
        "rank 3 was stopped at\n"
        "    line 2 of the cell: if mpi_rank == 3: time.sleep(100)\n"
        "ranks 0, 1, 2 finished\n"
        f"{GO_ON}"
    )
    assert run("print(1)", ranks=[3]) == "[rank 3] 1\n"


def test_a_rank_that_dies_on_the_other_node_is_named_with_the_reason(run):
    run("""
    import os, torch.distributed as dist
    from ddp_helpers.worker.environment import detect
    from ddp_helpers.worker.process_group import process_group
    """)
    began = time.monotonic()
    # In an MPI call the others notice too, and may abort before mpirun has said who was first.
    text = run("""
    with process_group(detect(), timeout_s=30):
        if mpi_rank == 3:
            os.kill(os.getpid(), 9)
        dist.barrier()
    """)
    assert time.monotonic() - began < 15
    reason = "rank 3's process ended by signal 9 (Killed); mpirun ended the others"
    assert text == f"{reason}\n{GO_ON}"


def test_the_controller_listens_only_where_the_nodes_reach_it_and_the_key_is_private(
    cluster, engines, run
):
    bridge = cluster.nodes[0].address.rpartition(".")[0] + ".254"
    controller = psutil.Process(engines._session.children["controller"].pid)
    connections = [
        connection
        for process in [controller, *controller.children(recursive=True)]
        for connection in process.net_connections()
        if connection.status == psutil.CONN_LISTEN
    ]
    # On 127.0.0.1 its own processes talk to each other.
    assert {connection.laddr.ip for connection in connections} == {bridge, "127.0.0.1"}
    text = run("""
    import pathlib
    file = next(pathlib.Path("/run/tmp").glob("ddp_helpers_engines_*/engine.json"))
    oct(file.stat().st_mode & 0o777), oct(file.parent.stat().st_mode & 0o777)
    """)
    assert text == "".join(f"[rank {rank}] ('0o600', '0o700')\n" for rank in range(4))
    written = engines._session.folder / "engine.json"
    key = json.loads(written.read_text())["key"]
    assert written.stat().st_mode & 0o777 == 0o600
    for process in psutil.process_iter():
        try:
            assert not any(key in word for word in process.cmdline())
        except psutil.Error:
            continue


def test_a_host_that_cannot_be_reached_is_named_with_ssh_s_reason(ranks):
    before = {one.pid for one in processes.of_kernel(os.getpid())}
    hosts = parse_hosts("node1:1,no-such-host.invalid:1")
    with pytest.raises(EnginesNotStarted) as failure:
        start_engines(hosts=hosts)
    assert str(failure.value) == (
        "no-such-host.invalid: ssh: Could not resolve hostname no-such-host.invalid:"
        " Name or service not known\n"
        "Find out more: python -m ddp_helpers ssh check no-such-host.invalid"
    )
    assert {one.pid for one in processes.of_kernel(os.getpid())} == before


KERNEL = """
import time
from ddp_helpers.launch.hosts import parse_hosts
from ddp_helpers.lesson.engines import start_engines
engines = start_engines(hosts=parse_hosts("node1:1,node2:1"))
try:
    engines.run("if mpi_rank: MPI.COMM_WORLD.Barrier()", timeout_s=1)
except RuntimeError:
    print("one rank hangs", flush=True)
time.sleep(100)
"""


def test_the_ranks_of_a_killed_kernel_end_on_both_nodes(cluster):
    process = subprocess.Popen([sys.executable, "-c", KERNEL], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"one rank hangs\n"
    assert len(processes.of_kernel(process.pid)) >= 7  # 3 keepers, controller, mpirun, 2 engines
    process.kill()
    process.wait()
    process.stdout.close()
    deadline = time.monotonic() + 15
    while processes.of_kernel(process.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not processes.of_kernel(process.pid)


def test_a_node_that_loses_its_power_is_named(real_nodes, monkeypatch):
    monkeypatch.setattr("ddp_helpers.lesson.keeper._ANSWER_S", 3.0)
    before = {one.pid for one in processes.of_kernel(os.getpid())}
    with practice_cluster(f"power-{os.getpid()}") as cluster:
        monkeypatch.setenv("PATH", cluster.environ()["PATH"])
        engines = start_engines(hosts=(Host("node1"), Host("node2")))
        try:
            os.kill(namespaces._first_pid(cluster.folder, "node2"), signal.SIGKILL)
            began = time.monotonic()
            with pytest.raises(RanksFailed) as failure:
                engines.run("MPI.COMM_WORLD.Barrier()", timeout_s=5)
            assert time.monotonic() - began < 15
            assert str(failure.value) == f"node2 does not answer any more\n{GO_ON}"
        finally:
            engines.stop()
    assert {one.pid for one in processes.of_kernel(os.getpid())} == before
