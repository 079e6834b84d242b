"""The doctor in the ranks of jobs with a fault, planted on real nodes: it names who, why and what.

Each rank is started by hand, with the variables a launcher would set, so that one can be left out,
started twice or given something wrong.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field

import psutil
import pytest

from ddp_helpers.launch.mpi import find_mpirun
from ddp_helpers.launch.practice_cluster import on_node, practice_cluster

pytestmark = pytest.mark.launcher

# Runs code first, which may plant a fault inside the rank's own process.
RANK = "import sys; {before}; from ddp_helpers.__main__ import main; sys.exit(main())"


@dataclass
class Rank:
    """One rank of a job with one rank on each node, and what is wrong with it."""

    rank: int
    environ: dict[str, str | None] = field(default_factory=dict)  # None: not set
    before: str = "pass"
    node: str = ""  # "": node1 for rank 0, node2 for rank 1
    args: tuple[str, ...] = ()


@dataclass(frozen=True)
class Said:
    """What the ranks printed together, their exit statuses, and after how many seconds."""

    text: str
    statuses: list[int | None]
    seconds: float


@pytest.fixture
def examine(free_port, running, tmp_path):
    """Run the doctor in ranks on a cluster's nodes, and wait for it; a stopped one is killed."""

    def examine(cluster, servers, ranks: list[Rank], world_size: int = 2, timeout_s=5) -> Said:
        before = running(cluster)
        began = time.monotonic()
        files = []
        for one in ranks:
            script = tmp_path / f"doctor_{len(list(tmp_path.glob('doctor_*.py')))}.py"
            script.write_text(RANK.format(before=one.before))
            args = ["doctor", "--timeout", str(timeout_s), *one.args]
            server = servers[one.node or f"node{one.rank + 1}"]
            files.append(server.start(script, 0, _variables(one, world_size, free_port), args))
        deadline = began + timeout_s + 50
        while time.monotonic() < deadline:
            waiting = [ended for _, ended in files if not ended.exists()]
            if len(waiting) <= len(_stopped(running(cluster) - before)):
                break  # what is stopped stays so, and all others have ended
            time.sleep(0.05)
        seconds = time.monotonic() - began
        for _, pid in running(cluster) - before:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        statuses = [int(e.read_text().split()[0]) if e.exists() else None for _, e in files]
        return Said("".join(output.read_text() for output, _ in files), statuses, seconds)

    return examine


def _stopped(found: set[tuple[str, int]]) -> list[int]:
    stopped = []
    for _, pid in found:
        with contextlib.suppress(psutil.NoSuchProcess):
            if psutil.Process(pid).status() == psutil.STATUS_STOPPED:
                stopped.append(pid)
    return stopped


def _variables(one: Rank, world_size: int, port: int) -> dict[str, str | None]:
    return {
        "RANK": str(one.rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "node1",
        "MASTER_PORT": str(port),
        **one.environ,
    }


def both(**environ: str | None) -> list[Rank]:
    return [Rank(0, environ), Rank(1, environ)]


OPEN_MPI = dict.fromkeys(("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"))
OPEN_MPI |= {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}
OPEN_MPI |= {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
TWO_HERE = {"LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": None}
ALL_CORES = "import os, torch; torch.set_num_threads(os.cpu_count())"  # without OMP_NUM_THREADS
ONE_CORE = "import os; os.sched_setaffinity(0, {0})"
HANGS = (
    "import os, signal; from ddp_helpers.doctor import links;"
    " links.reach = lambda places: os.kill(os.getpid(), signal.SIGSTOP)"
)
ENDS = "import os; from ddp_helpers.doctor import ladder; ladder._lead = lambda *a: os._exit(9)"
OTHER_TORCH = "import torch; torch.__version__ = '2.6.0'"
OTHER_PYTHON = "sys.executable = '/other/bin/python'"

# name: the ranks, and what must be said: level, where, seen, fix (patterns)
FAULTS = {
    "a rank never starts": (
        [Rank(0)],
        ("FAULT", "rank 1", r"did not come within 5 s; 1 of 2 ranks did", "Look at their output"),
    ),
    "a rank is started twice": (
        [Rank(0), Rank(1), Rank(1)],
        ("FAULT", "rank 1", r"was started twice: pid \d+ on node2, and pid \d+", "older job"),
    ),
    "world sizes differ": (
        [Rank(0), Rank(1, {"WORLD_SIZE": "3"})],
        ("FAULT", "rank 1 on node2", "world size of 3, rank 0 has 2", "same command"),
    ),
    "the master is localhost": (
        both(MASTER_ADDR="localhost"),
        ("FAULT", "rank 0 on node1", "MASTER_ADDR=localhost is 127.0.0.1, a loopback", r"10\.77\."),
    ),
    "the master is the other node": (
        both(MASTER_ADDR="node2"),
        (
            "FAULT",
            "rank 0 on node1",
            "is no address of node1, where rank 0 runs",
            r"10\.77\.\d+\.1",
        ),
    ),
    "the master is no node": (
        both(MASTER_ADDR="10.78.0.9"),
        ("FAULT", "rank 0 on node1", "is no address of node1", r"Set MASTER_ADDR to one of"),
    ),
    "the master's name is not known on one node": (
        [Rank(0), Rank(1, {"MASTER_ADDR": "nowhere.invalid"})],
        ("FAULT", "rank 1 on node2", "nowhere.invalid does not resolve on node2", "/etc/hosts"),
    ),
    "nobody is at the master": (
        [Rank(1)],
        (
            "FAULT",
            "rank 1 on node2",
            r"no store at node1:\d+: connection refused",
            "rank 0 started",
        ),
    ),
    "one node has no such interface": (
        [Rank(0), Rank(1, {"GLOO_SOCKET_IFNAME": "ib7"})],
        ("FAULT", "node2", "GLOO_SOCKET_IFNAME=ib7: there is no interface", "IFNAME=eth0"),
    ),
    "one node uses loopback": (
        [Rank(0), Rank(1, {"GLOO_SOCKET_IFNAME": "lo"})],
        ("FAULT", "node2", "IFNAME=lo is 127.0.0.1, which no other node can reach", "IFNAME=eth0"),
    ),
    "another torch on one node": (
        [Rank(0), Rank(1, before=OTHER_TORCH)],
        ("FAULT", "node", r"torch is 2\.\S+ on rank \d, elsewhere 2\.", "the same version"),
    ),
    "another interpreter on one node": (
        [Rank(0), Rank(1, before=OTHER_PYTHON)],
        ("warning", "node", r"interpreter is /\S+ on rank \d, elsewhere /", "Use one path"),
    ),
    "a rank stands still": (
        [Rank(0), Rank(1, before=HANGS)],
        ("FAULT", "rank 1 on node2", r"did not answer \(links\)", r"Look at pid \d+ on node2"),
    ),
    "rank 0 ends in the middle": (
        [Rank(0, before=ENDS), Rank(1)],
        ("FAULT", "rank 1 on node2", r"", "(the output of rank 0|Is rank 0 started)"),
    ),
    "mpirun's local rank is missing": (
        [Rank(0), Rank(1, OPEN_MPI)],
        ("FAULT", "node2", "OMPI_COMM_WORLD_LOCAL_RANK not set", "through the launcher"),
    ),
    "two ranks have one local rank": (
        [Rank(0), Rank(1, node="node1")],
        ("FAULT", "node1", "ranks 0, 1 all have local rank 0", "launcher's own variable"),
    ),
    "nccl without a GPU": (
        [Rank(0, args=("--backend", "nccl")), Rank(1, args=("--backend", "nccl"))],
        ("FAULT", "rank 1 on node2", "local rank 0 has no GPU", "--backend gloo"),
    ),
    "bound to one core": (
        [Rank(0, before=ONE_CORE), Rank(1, before=ONE_CORE)],
        ("warning", "node2", r"bound to one of \d+ cores", "--bind-to none"),
    ),
    "more threads than cores": (
        [
            Rank(0, TWO_HERE, ALL_CORES),
            Rank(1, {**TWO_HERE, "LOCAL_RANK": "1"}, ALL_CORES, node="node1"),
        ],
        ("warning", "node1", r"\d+ threads on \d+ cores \(2 ranks\)", "export OMP_NUM_THREADS="),
    ),
}


# What these lead to is a matter of facts alone: test_verdict.py has them, and `make faults`.
OF_FACTS = {
    "another torch on one node",
    "another interpreter on one node",
    "two ranks have one local rank",
    "nccl without a GPU",
    "bound to one core",
    "more threads than cores",
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.long] if n in OF_FACTS else []) for n in FAULTS],
)
def test_a_planted_fault_is_named_with_its_place_and_its_cure(examine, cluster, node_servers, name):
    ranks, (level, where, seen, fix) = FAULTS[name]
    said = examine(cluster, node_servers, ranks)
    pattern = rf"^{level} +{where}\S*: .*?{seen}.*?fix: .*?{fix}"
    assert re.search(pattern, said.text, re.M | re.S), said.text
    assert "Traceback" not in said.text
    if level == "FAULT":
        assert 0 not in said.statuses, said
    else:
        assert said.statuses == [0, 0], said
    assert said.seconds < 45


def test_a_port_that_is_taken_is_named_with_its_owner(
    examine, cluster, node_servers, running, free_port, wait_until
):
    code = f"import socket, time; s = socket.create_server(('', {free_port})); time.sleep(60)"
    before = running(cluster)
    holder = subprocess.Popen(on_node(cluster, "node1", [sys.executable, "-c", code]))
    try:
        wait_until(lambda: _listens(cluster.nodes[0].address, free_port))
        said = examine(cluster, node_servers, both())
    finally:
        for _, pid in running(cluster) - before:
            os.kill(pid, signal.SIGKILL)
        holder.wait()
    assert "rank 1 on node2: rank 1: " in said.text
    assert "does not answer as a store does" in said.text
    found = rf"FAULT    rank 0 on node1: MASTER_PORT={free_port} is in use on node1 by pid \d+"
    assert re.search(found, said.text), said.text


def _listens(address: str, port: int) -> bool:
    import socket

    with contextlib.suppress(OSError), socket.create_connection((address, port), timeout=1):
        return True
    return False


def test_a_link_between_two_nodes_that_drops_packets_is_named(examine, servers_on, real_nodes):
    with (
        practice_cluster(f"link-{os.getpid()}", nodes=3) as cluster,
        servers_on(cluster) as servers,
    ):
        # node2 sends what is for node3 to a card that is not there; the way to node1 is whole.
        address = cluster.nodes[2].address
        wrong = ["ip", "neigh", "replace", address, "lladdr", "02:00:00:00:00:01", "dev", "eth0"]
        subprocess.run(on_node(cluster, "node2", [*wrong, "nud", "permanent"]), check=True)
        said = examine(cluster, servers, [Rank(rank) for rank in range(3)], world_size=3)
    assert said.statuses == [1, 1, 1]
    assert f"FAULT    node2 to node3: rank 1 cannot connect to rank 2 at {address}: no reply" in (
        said.text
    )
    assert "node1 to" not in said.text.partition("FAULT")[2]


def test_a_debian_hosts_file_is_named_before_it_hangs_a_script(examine, servers_on, real_nodes):
    with practice_cluster(f"debian-{os.getpid()}") as cluster, servers_on(cluster) as servers:
        hosts = cluster.folder / "node2.hosts"
        hosts.write_text(f"127.0.1.1 node2\n{hosts.read_text()}")
        said = examine(cluster, servers, both())
    assert said.statuses == [0, 0]
    assert "warning  node2: its own name is 127.0.1.1 there" in said.text
    assert "On node2: export GLOO_SOCKET_IFNAME=eth0" in said.text


def test_B27_ranks_that_mpirun_binds_to_one_core_are_told(require):
    """https://github.com/tenstorrent/tt-metal/issues/33801: all threads on one core."""
    require(os.cpu_count() > 1, "needs two cores")
    mpirun = [find_mpirun().path, "-n", "2"]
    done = subprocess.run(
        [*mpirun, sys.executable, "-m", "ddp_helpers", "doctor"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    seen = r"^warning  \S+: .*bound to one of \d+ cores"
    assert re.search(seen, done.stdout, re.M), done.stdout
    assert "Add to mpirun: --bind-to none" in done.stdout


def test_two_healthy_nodes_are_healthy_and_their_link_is_measured(examine, cluster, node_servers):
    said = examine(cluster, node_servers, both())
    assert said.statuses == [0, 0]
    assert "ok       job: 2 ranks on 2 nodes work together" in said.text
    assert re.search(r"^node1 to node2: \d+\.\d\d ms round trip, \d+\.\d Gbit/s$", said.text, re.M)
    assert not re.search("FAULT|warning", said.text)
    rows = re.findall(r"^(\d)\s+(node\d)\s+0\s+cpu\s+eth0 10\.77\S+\s+/", said.text, re.M)
    assert rows == [("0", "node1"), ("1", "node2")]


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_fifty_healthy_runs_in_a_row_find_nothing(examine, cluster, node_servers):
    for _ in range(50):
        said = examine(cluster, node_servers, both())
        assert said.statuses == [0, 0], said.text
        assert not re.search("FAULT|warning", said.text), said.text


def test_the_rate_of_a_slow_link_is_measured(examine, servers_on, real_nodes):
    rate = practice_cluster(f"rate-{os.getpid()}", rate="200mbit")
    with rate as cluster, servers_on(cluster) as servers:
        ranks = both()
        ranks[0].args = ("--json",)
        said = examine(cluster, servers, ranks)
    document = json.loads(said.text[: said.text.rindex("}") + 1])
    assert document["healthy"] is True
    [link] = document["speeds"]
    assert (link["from"], link["to"]) == ("node1", "node2")
    assert link["bits_per_s"] == pytest.approx(200e6, rel=0.15)
    assert [one["host"] for one in document["ranks"]] == ["node1", "node2"]
