"""launch --run across two real nodes: started together over ssh, and ended together."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ddp_helpers.launch import namespaces
from ddp_helpers.launch.practice_cluster import on_node
from ddp_helpers.launch.remote import HostUnreachable, free_port_on, is_this_machine

SCRIPT = str(Path(__file__).with_name("rank_behaviours.py"))
LAUNCHERS = pytest.mark.parametrize("launcher", ["torchrun", "mpirun"])
pytestmark = pytest.mark.launcher


@pytest.fixture
def start(cluster, tmp_path, wait_until):
    """Start `launch --run` on node1 for both nodes; at the end nothing of it may run there."""
    started = []

    def begin(launcher, behaviour, *options):
        words = ["--launcher", launcher, "--hosts", "node1:1,node2:1", "--run", *options]
        words += [SCRIPT, behaviour, str(tmp_path)]
        argv = [sys.executable, "-m", "ddp_helpers", "launch", *words]
        started.append(
            subprocess.Popen(
                on_node(cluster, "node1", argv),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.communicate()
    wait_until(lambda: not of_jobs(cluster))


def of_jobs(cluster):
    rows = namespaces.processes(cluster).values()
    return [line for lines in rows for _, line in lines if "sshd" not in line]


@LAUNCHERS
def test_every_rank_of_both_nodes_is_heard_and_the_status_is_0(start, tmp_path, launcher):
    process = start(launcher, "say_here")
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    # Now and then Open MPI 5 adds a warning of its own: "setpgid failed in parent".
    lines = [line for line in out.splitlines() if line.startswith("[rank")]
    assert sorted(lines) == ["[rank 0] on node1", "[rank 1] on node2"]


@LAUNCHERS
def test_a_rank_that_raises_on_the_other_node_is_reported_and_ends_the_job(start, launcher):
    process = start(launcher, "fail_while_others_are_blocked")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert err.startswith("Rank 1 failed with exit code 1.\nTraceback")
    assert "ValueError: deliberate" in err
    where = "on node2 " if launcher == "torchrun" else ""  # mpirun is one command, typed on node1
    assert f"\nThe command {where}was: " in err


@LAUNCHERS
def test_a_deadline_ends_the_job_on_both_nodes(start, cluster, tmp_path, launcher, wait_until):
    process = start(launcher, "wait", "--timeout", "12")
    wait_until(lambda: len(list(tmp_path.glob("here_*"))) == 2)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "did not end within 12 s and was stopped." in err
    wait_until(lambda: not of_jobs(cluster), 2)  # what watches over the far side ends last


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=lambda n: n.name)
@LAUNCHERS
def test_the_job_ends_on_both_nodes_with_the_process_that_runs_it(
    start, cluster, tmp_path, launcher, number, wait_until
):
    process = start(launcher, "wait")
    wait_until(lambda: len(list(tmp_path.glob("here_*"))) == 2)
    for pid, line in namespaces.processes(cluster)["node1"]:
        if "ddp_helpers launch" in line:
            os.kill(pid, number)
    process.communicate(timeout=60)
    wait_until(lambda: not of_jobs(cluster), 20)


@LAUNCHERS
def test_B23_a_node_without_the_interpreter_is_named_with_the_path(start, cluster, launcher):
    """https://github.com/mpi4py/mpi4py/issues/573: the environment is on one node only."""
    folder = Path(sys.executable).parent
    subprocess.run(on_node(cluster, "node2", ["mount", "-t", "tmpfs", "none", folder]), check=True)
    try:
        process = start(launcher, "say_here")
        _, err = process.communicate(timeout=20)
    finally:
        subprocess.run(on_node(cluster, "node2", ["umount", folder]), check=True)
    assert process.returncode == 1
    assert re.search(rf"{folder}/(python|prted)'?: No such file or directory", err), err
    assert "node2" in err


def test_values_with_blanks_quotes_and_dollars_arrive_unchanged_and_run_nothing(cluster, tmp_path):
    words = ["a b", "it's", '"', "$HOME", ";touch x", "`id`", "*", ""]
    script = tmp_path / "show.py"
    script.write_text("import sys; print(sys.argv[1:], flush=True)")
    argv = [sys.executable, "-m", "ddp_helpers", "launch", "--hosts", "node1:1,node2:1", "--run"]
    done = subprocess.run(
        on_node(cluster, "node1", [*argv, str(script), *words]),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.stdout == f"{words}\n{words}\n", done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["show.py"]


def test_a_free_port_is_found_where_it_is_needed(cluster):
    code = "from ddp_helpers.launch.remote import free_port_on as f; import sys\n"
    code += "print(f('node2', sys.executable))"
    done = subprocess.run(
        on_node(cluster, "node1", [sys.executable, "-c", code]),
        capture_output=True,
        text=True,
        check=True,
    )
    assert 1024 <= int(done.stdout) < 65536


def test_a_host_that_cannot_be_asked_is_named():
    with pytest.raises(HostUnreachable, match="^no-such.invalid could not be asked .*\nTry: ssh"):
        free_port_on("no-such.invalid", "python3")


def test_this_machine_is_known_by_its_name_and_its_addresses():
    assert is_this_machine("localhost")
    assert is_this_machine("127.0.0.2")
    assert not is_this_machine("203.0.113.7")
    assert not is_this_machine("no-such.invalid")
