"""What is started on two real nodes: Slurm, and an MPI that is not beside python."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ddp_helpers.launch.practice_cluster import on_node, processes

# As little as Slurm needs. Without config_overrides it counts this machine's cores and memory.
SLURM_CONF = """\
ClusterName=practice
SlurmctldHost=node1
SlurmUser=root
StateSaveLocation={folder}
SlurmdSpoolDir={folder}/%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SlurmdParameters=config_overrides
NodeName=node[1-2] CPUs=2
PartitionName=main Nodes=ALL Default=YES
"""
MUNGED = ("munged", "--foreground", "--key-file={0}/key", "--seed-file={0}/seed_{1}")


@pytest.fixture(scope="module")
def slurm(cluster, require, tmp_path_factory):
    """Slurm on both nodes; its files lie in a folder of this test, its sockets in a node's /run."""
    path = f"{os.environ['PATH']}:/usr/sbin"  # where daemons are
    for program, package in (
        ("munged", "munge"),
        ("slurmctld", "slurm-wlm"),
        ("srun", "slurm-wlm"),
    ):
        require(shutil.which(program, path=path), f"{program} not found: apt-get install {package}")
    folder = tmp_path_factory.mktemp("slurm")
    configuration = folder / "slurm.conf"
    configuration.write_text(SLURM_CONF.format(folder=folder))
    (folder / "key").write_bytes(os.urandom(1024))
    (folder / "key").chmod(0o600)
    names = [node.name for node in cluster.nodes]
    daemons = [(name, [word.format(folder, name) for word in MUNGED]) for name in names]
    daemons += [(names[0], ["slurmctld", "-D"]), *((name, ["slurmd", "-D"]) for name in names)]
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        patch.setenv("SLURM_CONF", str(configuration))
        patch.setenv("PATH", path)
        for name in names:
            subprocess.run(on_node(cluster, name, ["mkdir", "/run/munge"]), check=True)
        for number, (name, argv) in enumerate(daemons):
            log = folder / f"{number}_{argv[0]}_{name}.log"
            stack.enter_context(_daemon(cluster, name, argv, log))
        _wait_until_idle(cluster, folder)
        yield


@contextlib.contextmanager
def _daemon(cluster, node: str, argv: list[str], log: Path):
    """Run argv on node; end it, and what it has started there, at the end of the block."""
    before = processes(cluster)[node]
    with open(log, "wb") as output:
        process = subprocess.Popen(
            on_node(cluster, node, argv), stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
    try:
        yield
    finally:
        # The process started here only waits for the daemon, and would not hand a signal on.
        for pid, _ in set(processes(cluster)[node]) - set(before):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        process.wait(timeout=20)


def _wait_until_idle(cluster, folder: Path, timeout_s: float = 30) -> None:
    deadline = time.monotonic() + timeout_s
    ask = on_node(cluster, "node1", ["sinfo", "--noheader", "--format=%N %T"])
    answer = ""
    while answer != "node[1-2] idle":
        if time.monotonic() > deadline:
            logs = "".join(f"{path.name}:\n{path.read_text()}\n" for path in folder.glob("*.log"))
            pytest.fail(f"Slurm says {answer!r} after {timeout_s:g} s.\n{logs}")
        done = subprocess.run(ask, capture_output=True, text=True, check=False, timeout=timeout_s)
        answer = done.stdout.strip()
        time.sleep(0.05)


@pytest.fixture(scope="session")
def intel_mpirun(require, tmp_path_factory):
    """Intel MPI from PyPI, in a folder of its own: it and Open MPI would overwrite each other."""
    folder = tmp_path_factory.mktemp("intel_mpi")
    try:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        pip += ["--ignore-installed", "--prefix", str(folder), "impi-rt"]
        done = subprocess.run(pip, capture_output=True, text=True, check=False, timeout=300)
        said = done.stderr.strip().rpartition("\n")[2]
        require(done.returncode == 0, f"pip install impi-rt: {said}")
        # Not bin/mpirun, a script that starts the first mpiexec.hydra on PATH, be it MPICH's.
        yield str(folder / "bin" / "mpiexec")
    finally:
        shutil.rmtree(folder)  # 320 MB, which pytest would keep for its next three runs
