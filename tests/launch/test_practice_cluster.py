"""The practice cluster: two real nodes, used as a cluster is, and nothing left of it."""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ddp_helpers.launch import cluster_cli, loopback_nodes, namespaces
from ddp_helpers.launch.cluster import ClusterError
from ddp_helpers.launch.commands import Job, plan
from ddp_helpers.launch.practice_cluster import (
    down,
    find,
    on_node,
    practice_cluster,
    processes,
    up,
)
from ddp_helpers.launch.runner import run_local

CLUSTER = [sys.executable, "-m", "ddp_helpers", "cluster"]
SCRIPT = str(Path(__file__).with_name("rank_behaviours.py"))


pytestmark = pytest.mark.launcher


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """A folder of the test's own for clusters; at the end nothing of them may be left."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    yield tmp_path
    assert not list(tmp_path.glob("ddp_helpers_clusters-*"))
    assert not namespaces._marked(tmp_path / f"ddp_helpers_clusters-{os.geteuid()}")
    assert str(tmp_path) not in Path("/proc/mounts").read_text()
    aliases = [path.read_text() for path in Path("/sys/class/net").glob("*/ifalias")]
    assert not [alias for alias in aliases if str(tmp_path) in alias]


def run(cluster, node, *argv, **options):
    options = {"capture_output": True, "text": True, "timeout": 60, "check": False} | options
    return subprocess.run(on_node(cluster, node, argv), **options)


def test_each_node_has_its_own_name_address_and_processes(cluster):
    for node, other in (cluster.nodes, cluster.nodes[::-1]):
        assert run(cluster, node.name, "hostname").stdout == f"{node.name}\n"
        addresses = run(cluster, node.name, "ip", "-br", "-4", "address").stdout
        assert f" {node.address}/24" in addresses
        assert other.address not in addresses
        assert run(cluster, node.name, "cat", "/proc/1/comm").stdout == "sshd\n"
        found = run(cluster, node.name, "getent", "hosts", other.name).stdout
        assert found.split() == [other.address, other.name]


def test_ssh_works_between_all_nodes_and_from_this_machine_without_a_question(cluster):
    for a in cluster.nodes:
        for b in cluster.nodes:
            done = run(cluster, a.name, "ssh", b.name, "hostname")
            assert (done.stdout, done.stderr, done.returncode) == (f"{b.name}\n", "", 0)
        config = str(cluster.folder / "ssh_config")
        done = subprocess.run(
            ["ssh", "-F", config, a.name, "hostname"], capture_output=True, text=True, check=True
        )
        assert done.stdout == f"{a.name}\n"


def test_this_machine_reaches_the_nodes_by_name_when_it_takes_the_clusters_environment(cluster):
    take = f'eval "$({shlex.join([*CLUSTER, "env", "--name", cluster.name])})"; '
    done = subprocess.run(
        ["sh", "-c", take + "ssh node1 hostname; ssh -T node2 hostname"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == "node1\nnode2\n"
    job = Job("-c", ("import socket; print(socket.gethostname())",), hosts=cluster.hosts(2))
    output = run_local(plan("mpirun", job), 60, echo=False, environ=cluster.environ())
    assert sorted(output.split()) == ["node1", "node1", "node2", "node2"]


def test_a_command_has_the_callers_folder_and_environment_and_gives_its_status(
    cluster, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORD", "a 'b' $c")
    done = run(cluster, "node2", "sh", "-c", 'pwd; echo "$WORD"; exit 7')
    assert (done.stdout, done.returncode) == (f"{tmp_path}\na 'b' $c\n", 7)
    assert run(cluster, "node2", "sh", "-c", "kill -9 $$").returncode == -9
    name = cluster.name
    printed = subprocess.run(
        [*CLUSTER, "exec", "--name", name, "node1", "--", "sh", "-c", "hostname; exit 3"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (printed.stdout, printed.returncode) == ("node1\n", 3)


def test_status_says_what_runs_where(cluster, capsys, wait_until):
    with subprocess.Popen(on_node(cluster, "node2", ["sleep", "77"])) as process:
        try:
            wait_until(lambda: any("sleep 77" in line for _, line in processes(cluster)["node2"]))
            args = ["status", "--name", cluster.name]
            assert subprocess.run([*CLUSTER, *args], check=True, capture_output=True).stdout
            cluster_cli._show(find(cluster.name))
            shown = capsys.readouterr().out.splitlines()
            assert [line for line in shown if "sleep" in line][0].endswith("  sleep 77")
            assert not any("sleep" in line for _, line in processes(cluster)["node1"])
        finally:
            process.kill()


@pytest.mark.usefixtures("real_nodes")
def test_up_again_is_the_same_cluster_and_another_shape_is_refused(folders):
    first = up("again")
    assert up("again") == first == find("again")
    with pytest.raises(ClusterError, match=r"again is up already: .* 2 nodes.*\nRemove it first"):
        up("again", nodes=3)
    assert down("again")
    assert not down("again")
    with pytest.raises(ClusterError, match=r"^no cluster again is up.\nMake it: .* up --name aga"):
        find("again")


@pytest.mark.usefixtures("real_nodes")
def test_two_clusters_have_networks_of_their_own_and_neither_takes_one_in_use(folders):
    free = next(namespaces._free_networks())
    subprocess.run(["ip", "link", "add", "inuse0", "type", "bridge"], check=True)
    try:
        subprocess.run(["ip", "address", "add", f"{free[9]}/24", "dev", "inuse0"], check=True)
        with practice_cluster("one") as one, practice_cluster("two", nodes=3) as two:
            addresses = [node.address.rsplit(".", 1)[0] for node in (*one.nodes, *two.nodes)]
            assert len(set(addresses)) == 2
            assert str(free[9]).rsplit(".", 1)[0] not in addresses
            assert run(one, "node1", "ssh", "node2", "hostname").stdout == "node2\n"
            assert run(two, "node1", "ssh", "node3", "hostname").stdout == "node3\n"
    finally:
        subprocess.run(["ip", "link", "delete", "inuse0"], check=True)


@pytest.mark.usefixtures("real_nodes")
def test_the_rate_limits_both_directions_of_each_link(folders):
    with practice_cluster("slow", rate="200mbit") as slow:
        for node, link in zip(slow.nodes, namespaces._links(slow)[1:], strict=True):
            inside = run(slow, node.name, "tc", "qdisc", "show", "dev", "eth0").stdout
            outside = subprocess.check_output(["tc", "qdisc", "show", "dev", link], text=True)
            assert "tbf" in inside
            assert "rate 200Mbit" in inside
            assert "rate 200Mbit" in outside


@pytest.mark.usefixtures("real_nodes")
@pytest.mark.parametrize("moment", ["cluster.json", "node1.hosts", "node1.pid", "node2.pid"])
def test_down_removes_what_an_up_that_was_killed_has_left(folders, moment, wait_until):
    process = subprocess.Popen([*CLUSTER, "up", "--name", "half"], stdout=subprocess.DEVNULL)
    wait_until(lambda: list(folders.glob(f"ddp_helpers_clusters-*/half/{moment}")), poll_s=0.002)
    process.kill()
    process.wait()
    assert down("half")


@pytest.mark.usefixtures("real_nodes")
def test_up_goes_on_where_an_up_that_was_killed_has_left_something(folders, wait_until):
    process = subprocess.Popen([*CLUSTER, "up", "--name", "half"], stdout=subprocess.DEVNULL)
    wait_until(lambda: list(folders.glob("ddp_helpers_clusters-*/half/node1.pid")), poll_s=0.002)
    process.kill()
    process.wait()
    made = up("half")
    assert run(made, "node2", "ssh", "node1", "hostname").stdout == "node1\n"
    assert down("half")


@pytest.mark.usefixtures("real_nodes")
def test_down_ends_a_job_and_what_a_killed_launcher_has_left(folders, wait_until):
    made = up("busy")
    (command,) = plan(
        "mpirun", Job(SCRIPT, ("wait_and_one_ignores_sigterm", str(folders)), hosts=made.hosts(1))
    )
    launcher = subprocess.Popen(
        on_node(made, "node1", command.argv), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    wait_until(lambda: len(list(folders.glob("here_*"))) == 2)
    launcher.kill()
    launcher.wait()
    assert any("rank_behaviours" in line for _, line in processes(made)["node2"])
    assert down("busy")
    assert not [line for _, line in all_processes() if str(folders) in line]


def all_processes():
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            line = (directory / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if int(directory.name) != os.getpid():
            yield int(directory.name), line


@pytest.mark.usefixtures("real_nodes")
def test_the_cluster_ends_with_a_process_that_is_killed(folders, wait_until):
    code = "from ddp_helpers.launch.practice_cluster import practice_cluster\n"
    code += "import time\nwith practice_cluster('guarded'):\n    print('up', flush=True)\n"
    code += "    time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "up\n"
    process.kill()
    process.communicate()
    wait_until(lambda: not list(folders.glob("ddp_helpers_clusters-*")))


@pytest.mark.usefixtures("real_nodes")
def test_twenty_clusters_one_after_the_other_leave_nothing(folders):
    for _ in range(20):
        with practice_cluster("cycle") as made:
            job = Job("-c", ("import os; print(os.uname().nodename)",), hosts=made.hosts(2))
            (command,) = plan("mpirun", job)
            done = run(made, "node1", *command.argv)
            assert sorted(done.stdout.split()) == ["node1", "node1", "node2", "node2"], done.stdout
            first = [namespaces._first_pid(made.folder, node.name) for node in made.nodes]
            spaces = {namespaces._pid_space(pid) for pid in first}
            assert len(spaces) == 2
        assert not [pid for pid in namespaces._all_pids() if namespaces._pid_space(pid) in spaces]


# --- without root -------------------------------------------------------------------------------


def test_loopback_nodes_are_two_hosts_for_mpirun_with_a_clean_environment(folders, monkeypatch):
    monkeypatch.setenv("STRAY", "1")
    with practice_cluster("loop", loopback=True) as made:
        assert [host.name for host in made.hosts()] == ["127.0.0.2", "127.0.0.3"]
        code = "import os; e = os.environ"
        code += "; print(e['OMPI_COMM_WORLD_LOCAL_RANK'], 'STRAY' in e, flush=True)"
        (command,) = plan("mpirun", Job("-c", (code,), hosts=made.hosts(2)))
        done = run(made, "node1", *command.argv)
        # Both "hosts" are other machines for mpirun: their ranks see what sshd would give them.
        assert sorted(done.stdout.splitlines()) == ["0 False", "0 False", "1 False", "1 False"], (
            done
        )


def test_loopback_nodes_say_what_they_are_not(folders, capsys):
    up("loop", loopback=True)
    cluster_cli._show(find("loop"))
    assert loopback_nodes.WHAT_IT_IS_NOT in capsys.readouterr().out
    assert down("loop")


def test_ssh_of_loopback_nodes_takes_options_and_a_command_as_ssh_does(folders, monkeypatch):
    with practice_cluster("loop", loopback=True) as made:
        done = run(
            made,
            "node1",
            "ssh",
            "-T",
            "-o",
            "BatchMode=yes",
            "-x",
            "127.0.0.3",
            "echo",
            "'a  b'; pwd",
        )
        assert done.stdout == f"a  b\n{Path.home()}\n"


# --- wrong use ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "Two Words"}, "cluster name 'Two Words': use a-z"),
        ({"name": "../up"}, "cluster name '../up': use a-z"),
        ({"nodes": 1}, "1 nodes, expected 2 to 16"),
        ({"rate": "fast", "loopback": True}, "loopback nodes have no link of their own"),
    ],
)
def test_what_cannot_be_made_is_refused(folders, options, message):
    with pytest.raises(ClusterError, match=message):
        up(**options)


@pytest.mark.usefixtures("real_nodes")
def test_a_rate_that_tc_does_not_know_is_refused(folders):
    with pytest.raises(ClusterError, match="rate 'fast', expected a number with kbit, mbit or gb"):
        up(rate="fast")


def test_a_missing_program_is_named_with_its_package(folders, monkeypatch):
    monkeypatch.setattr(namespaces, "_which", lambda program: program != "sshd" and program)
    with pytest.raises(
        ClusterError, match=r"sshd not found.\nInstall it: apt-get install openssh-s"
    ):
        namespaces.check(None)


def test_a_folder_of_somebody_else_is_refused(folders):
    (folders / f"ddp_helpers_clusters-{os.geteuid()}").mkdir(mode=0o755)
    with pytest.raises(ClusterError, match="is not a private folder of this user"):
        up(loopback=True)
    shutil.rmtree(folders / f"ddp_helpers_clusters-{os.geteuid()}")


def test_an_unknown_node_is_named_and_the_status_is_2(folders):
    with practice_cluster("loop", loopback=True):
        done = subprocess.run(
            [*CLUSTER, "exec", "--name", "loop", "node9", "true"],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 2
        assert done.stderr == "error: no node node9 in cluster loop.\nIt has: node1, node2.\n"
