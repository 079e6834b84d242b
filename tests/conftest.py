"""Fixtures for all tests: a clean environment, and ranks started without a launcher."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import pytest

from ddp_helpers.launch import namespaces
from ddp_helpers.launch.cluster import Cluster, ClusterError
from ddp_helpers.launch.practice_cluster import on_node, practice_cluster, processes
from ddp_helpers.worker import network

T = TypeVar("T")

# A shell starts what it runs in the background with Ctrl-C ignored, and so would every command be
# that a test starts and interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)

if os.geteuid() == 0:  # Open MPI refuses root otherwise; engines and launchers inherit this
    os.environ.setdefault("OMPI_ALLOW_RUN_AS_ROOT", "1")
    os.environ.setdefault("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")


@pytest.fixture(scope="session", autouse=True)
def files_of_the_user_are_left_alone():
    """Fail the run when a test changed the user's ssh files or the machine's hosts file."""
    before = users_files()
    yield
    assert users_files() == before


def users_files() -> dict[Path, bytes]:
    ssh = Path("~/.ssh").expanduser()
    files = [path for path in [*ssh.rglob("*"), Path("/etc/hosts")] if path.is_file()]
    return {path: path.read_bytes() for path in files} | {ssh: str(ssh.exists()).encode()}


@pytest.fixture(autouse=True)
def environment_is_left_alone():
    """Fail a test that leaves an environment variable changed behind."""
    before = dict(os.environ)
    yield
    after = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    before.pop("PYTEST_CURRENT_TEST", None)
    os.environ.update(before)
    for name in set(after) - set(before):
        del os.environ[name]
    assert after == before


@pytest.fixture(autouse=True)
def inductor_cache(monkeypatch, tmp_path_factory):
    """Set the variable that torch sets when DDP or compile is first used, so no test leaks it."""
    folder = tmp_path_factory.getbasetemp() / "inductor"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))


@pytest.fixture(scope="session")
def require():
    """Skip a test where the machine lacks what it needs; in CI it fails, so that none is lost.

    require(shutil.which("srun"), "srun not found: apt-get install slurm-wlm") returns its path.
    """

    def require(found: T, reason: str) -> T:
        if not found and os.environ.get("CI") == "true":
            pytest.fail(reason)
        if not found:
            pytest.skip(reason)
        return found

    return require


@pytest.fixture(scope="session")
def real_nodes(require):
    """Skip, or in CI fail, where nodes of namespaces cannot be made."""
    require(sys.platform == "linux" and os.geteuid() == 0, "two real nodes: root on Linux only")
    missing = ""
    try:
        namespaces.check(None)
    except ClusterError as error:
        missing = str(error)
    require(not missing, missing)


@pytest.fixture(scope="module")
def cluster(real_nodes):
    """Two nodes, node1 and node2, with nothing on them."""
    with practice_cluster() as cluster:
        yield cluster


@pytest.fixture
def firewall(cluster):
    """Drop the TCP packets that a node sends to another, but those of one port.

    firewall(node, other, "dport 29500") or "sport 22": what is for the port, or comes from it.
    """
    closed = []

    def ip(node, words: str) -> None:
        subprocess.run(on_node(cluster, node.name, ["ip", *words.split()]), check=True)

    def firewall(node, other, port: str) -> None:
        closed.append(node)
        nobody = other.address.rpartition(".")[0] + ".200"  # gets all else; no card has its address
        ip(node, f"neigh replace {nobody} lladdr 02:00:00:00:00:01 dev eth0 nud permanent")
        ip(node, f"route add {other.address} via {nobody} dev eth0 onlink table 100")
        ip(node, f"rule add pref 10 ipproto tcp {port} lookup main")
        ip(node, "rule add pref 11 ipproto tcp lookup 100")

    yield firewall
    for node in closed:
        for words in ("rule del pref 11", "rule del pref 10", "route flush table 100"):
            ip(node, words)


@pytest.fixture(scope="session")
def running():
    """Return (node, process number on this machine) of all that runs on a cluster's nodes."""

    def running(cluster: Cluster) -> set[tuple[str, int]]:
        return {(node, pid) for node, found in processes(cluster).items() for pid, _ in found}

    return running


@pytest.fixture(scope="session")
def wait_until():
    """Wait until a condition holds and return its value; fail the test when it never does.

    wait_until(lambda: list(folder.glob("here_*"))) returns the files. poll_s is the time between
    two looks, for what lasts only a moment.
    """

    def wait_until(condition: Callable[[], T], timeout_s: float = 40, poll_s: float = 0.05) -> T:
        deadline = time.monotonic() + timeout_s
        while not (value := condition()):
            assert time.monotonic() < deadline, f"waited in vain for {timeout_s:g} s"
            time.sleep(poll_s)
        return value

    return wait_until


@dataclass(frozen=True)
class Finished:
    """How one rank ended: its exit status, what it printed, and after how many seconds."""

    status: int
    output: str
    seconds: float


class RankServer:
    """What forks ranks, here or behind the prefix of a node: see tests/rank_server.py."""

    def __init__(self, prefix: Sequence[str] = ()):
        self._process = subprocess.Popen(
            [*prefix, sys.executable, str(Path(__file__).with_name("rank_server.py"))],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def wait_until_ready(self) -> None:
        """Wait until it runs, on its node, and has imported torch."""
        assert self._process.stdout.readline() == "ready\n"

    def start(
        self, script: Path, number: int, changes: dict[str, str | None], args: Sequence[str]
    ) -> tuple[Path, Path]:
        """Start a rank; return the file of its output, and that of its end when it has ended.

        changes are variables that differ from this process's, None for one that is not set.
        """
        changed = {**os.environ, "OMP_NUM_THREADS": "1", **changes}
        environ = {name: value for name, value in changed.items() if value is not None}
        output = script.with_name(f"{script.stem}_{number}.log")
        request = {"script": str(script), "args": args, "environ": environ}
        request |= {"cwd": str(script.parent), "output": str(output)}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return output, output.with_suffix(".ended")

    def stop(self) -> None:
        self._process.stdin.close()
        self._process.wait(timeout=20)
        self._process.stdout.close()


@pytest.fixture(scope="session")
def rank_server():
    server = RankServer()
    server.wait_until_ready()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def servers_on():
    """Start one server of ranks for each node: with servers_on(cluster) as {name: RankServer}."""

    @contextlib.contextmanager
    def servers_on(cluster: Cluster):
        servers = {node.name: RankServer(on_node(cluster, node.name, [])) for node in cluster.nodes}
        for server in servers.values():
            server.wait_until_ready()
        yield servers
        for server in servers.values():
            server.stop()

    return servers_on


@pytest.fixture(scope="module")
def node_servers(cluster, servers_on):
    with servers_on(cluster) as servers:
        yield servers


@pytest.fixture
def free_port() -> int:
    return network.free_port()


@pytest.fixture
def start_ranks(rank_server, tmp_path: Path, free_port: int):
    """Start one rank per entry of environments, together, and wait for all of them.

    start_ranks(code, 2) exports RANK, WORLD_SIZE, ... for 2 ranks on this machine;
    start_ranks(code, [{...}, {...}]) starts one process per mapping with just those variables.
    """

    def start(code: str, environments, *args: str, timeout_s: float = 120) -> list[Finished]:
        if isinstance(environments, int):
            environments = [
                {
                    "RANK": str(rank),
                    "WORLD_SIZE": str(environments),
                    "LOCAL_RANK": str(rank),
                    "LOCAL_WORLD_SIZE": str(environments),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(free_port),
                }
                for rank in range(environments)
            ]
        ranks = [(rank_server, variables) for variables in environments]
        return _wait_for(_start(tmp_path, code, ranks, args), timeout_s)

    yield start
    for pid in tmp_path.glob("ranks_*.pid"):
        if not pid.with_suffix(".ended").exists():
            os.kill(int(pid.read_text()), signal.SIGKILL)


@pytest.fixture
def start_ranks_on_nodes(cluster, node_servers, running, tmp_path: Path, free_port: int):
    """Start ranks on the nodes of the cluster, one for each (node, rank, changes), and wait.

    Each has its rank alone on its node, in a job of two with rank 0 on node1; changes are variables
    that differ from this, None for one that is not set.
    """
    before = running(cluster)

    def start(code: str, ranks, *args: str, timeout_s: float = 60) -> list[Finished]:
        job = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        job |= {"MASTER_ADDR": "node1", "MASTER_PORT": str(free_port)}
        started = []
        for node, rank, changes in ranks:
            started.append((node_servers[node], {"RANK": str(rank), **job, **changes}))
        return _wait_for(_start(tmp_path, code, started, args), timeout_s)

    yield start
    for _, pid in running(cluster) - before:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _start(folder: Path, code: str, ranks, args: Sequence[str]) -> list[tuple[Path, Path]]:
    script = folder / f"ranks_{len(list(folder.glob('ranks_*.py')))}.py"
    script.write_text(code)
    return [
        server.start(script, number, variables, args)
        for number, (server, variables) in enumerate(ranks)
    ]


def _wait_for(ranks: list[tuple[Path, Path]], timeout_s: float) -> list[Finished]:
    """Wait for what RankServer.start returned; fail the test when a rank still runs then."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and not all(ended.exists() for _, ended in ranks):
        time.sleep(0.02)
    texts = [output.read_text() if output.exists() else "" for output, _ in ranks]
    late = [number for number, (_, ended) in enumerate(ranks) if not ended.exists()]
    assert not late, f"ranks {late} still ran after {timeout_s} s:\n" + "\n".join(texts)
    ends = [ended.read_text().split() for _, ended in ranks]
    return [
        Finished(int(status), text, float(seconds))
        for (status, seconds), text in zip(ends, texts, strict=True)
    ]
