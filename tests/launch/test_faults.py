"""A rank fails in one of five ways, under each launcher, on one node and on two.

The job ends in bounded time, with a status that is not 0; the rank is named; no process is left.
`make faults` runs all trials and prints a table of their times; every run has a sample of five.
"""

import random
import re
import shutil
import time
from pathlib import Path

import psutil
import pytest

from ddp_helpers.launch.commands import Job, mpirun, plan
from ddp_helpers.launch.hosts import local
from ddp_helpers.launch.mpi import Mpi, find_mpirun
from ddp_helpers.launch.runner import JobFailed, run_local

pytestmark = pytest.mark.launcher

SCRIPT = Path(__file__).with_name("faulty_rank.py")
LAUNCHERS = ("torchrun", "torch.distributed.launch", "Open MPI 5", "Open MPI 4")
FAULTS = ("kill", "stop", "raise", "exit", "skip")
ROUNDS = 2  # of all combinations: 80 trials
LIMIT_S = 60  # what starts takes some seconds, gloo's timeout 8 and the end of a stopped rank 10


@pytest.fixture
def commands(require, request):
    """Return the commands that start a job under a launcher."""

    def commands(launcher: str, job: Job):
        if launcher == "Open MPI 5":
            return mpirun(job, find_mpirun())
        if launcher == "Open MPI 4":
            path = require(shutil.which("mpirun.openmpi"), "apt-get install openmpi-bin")
            return mpirun(job, Mpi("Open MPI", (4, 1), path))
        return plan(launcher, job)

    return commands


@pytest.fixture
def trial(cluster, commands, monkeypatch):
    """Run one job with a fault; return how long it took, and what was said of it."""
    monkeypatch.setenv("PATH", cluster.environ()["PATH"])

    def trial(launcher: str, nodes: int, fault: str, chance: random.Random) -> tuple[float, str]:
        n = 3 if nodes == 1 else 4
        rank, step = chance.randrange(n), chance.randrange(6)
        hosts = local(n) if nodes == 1 else cluster.hosts(2)
        job = Job(str(SCRIPT), (fault, str(rank), str(step)), hosts=hosts)
        began = time.monotonic()
        with pytest.raises(JobFailed) as failed:
            run_local(commands(launcher, job), LIMIT_S, echo=False)
        seconds = time.monotonic() - began
        said = f"{failed.value}\n{failed.value.output}"
        assert "did not end within" not in str(failed.value), said
        assert re.search(NAMED[fault].format(rank=rank), said), said
        running = [process.info["cmdline"] or () for process in psutil.process_iter(["cmdline"])]
        assert not [words for words in running if str(SCRIPT) in words]  # on the nodes neither
        return seconds, str(failed.value)

    return trial


# How each fault must be told, whichever rank it is.
NAMED = {
    "kill": r"(Rank {rank} was ended by signal 9|rank {rank}\b.*\n?.*signal 9)",
    "stop": r"rank {rank}( on \S+ \(pid \d+\))? does not answer: it is stopped",
    "raise": r"ValueError: boom",
    "exit": r"rank {rank} on \S+ \(pid \d+\) failed first: SystemExit: 0",
    "skip": r"rank {rank} on \S+ \(pid \d+\) has left the process group",
}
SAMPLE = (
    ("torchrun", 1, "kill"),
    ("torch.distributed.launch", 2, "stop"),
    ("Open MPI 5", 2, "raise"),
    ("Open MPI 4", 1, "exit"),
    ("torchrun", 2, "skip"),
)


@pytest.mark.parametrize(("launcher", "nodes", "fault"), SAMPLE)
def test_a_rank_that_fails_is_named_and_ends_the_job(trial, launcher, nodes, fault):
    seconds, _ = trial(launcher, nodes, fault, random.Random(f"{launcher} {fault}"))
    assert seconds < LIMIT_S


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_every_fault_under_every_launcher_ends_the_job_and_is_named(trial):
    table = []
    for number in range(ROUNDS):
        for launcher in LAUNCHERS:
            for nodes in (1, 2):
                for fault in FAULTS:
                    chance = random.Random(f"{number} {launcher} {nodes} {fault}")
                    seconds, _ = trial(launcher, nodes, fault, chance)
                    table.append((seconds, launcher, nodes, fault))
                    print(f"{seconds:6.1f} s  {launcher:25} {nodes} node(s)  {fault}", flush=True)
    assert len(table) == ROUNDS * 40
