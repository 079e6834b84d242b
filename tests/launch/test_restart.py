"""train_resnet killed or told to stop under every launcher, started again, and none the worse."""

import contextlib
import os
import re
import signal
import subprocess
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

import ddp_helpers
import ddp_helpers.scripts.train_resnet as train_resnet
from ddp_helpers.launch.commands import Job, plan, srun, torchrun
from ddp_helpers.launch.hosts import local
from ddp_helpers.launch.practice_cluster import on_node, processes
from ddp_helpers.launch.runner import launch_here
from ddp_helpers.results import read_results

pytestmark = pytest.mark.launcher

MODULE = train_resnet.__name__
TRAINING = ("--use_syn", "--image_size", "8", "--batch_size", "16", "--backend", "gloo")
ENV = {"PYTHONPATH": str(Path(ddp_helpers.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
RANK_VARIABLES = {"torchrun": "RANK", "mpirun": "OMPI_COMM_WORLD_RANK", "srun": "SLURM_PROCID"}
STOPPED = re.compile("stopped by a signal, saved .*: continue with --resume")


@pytest.fixture(scope="module")
def uninterrupted():
    """The hash of the parameters that two ranks train without a break."""
    results = launch_here("torchrun", MODULE, *TRAINING, "--epochs", "1")
    (parameters,) = {each["parameters"] for each in results}
    return parameters


@pytest.fixture
def job(tmp_path):
    saving = ("--epochs", "1", "--save", str(tmp_path / "run"), "--save_every", "4", "--resume")
    args = (*TRAINING, *saving, "--result_dir", str(tmp_path / "results"), "--timeout", "60")
    return Job(MODULE, args, True, local(2), env=ENV)


@pytest.fixture
def start(tmp_path):
    """Start a command, its output in a file; end what is left of it after the test."""
    started = []

    def start(command, argv=None):
        log = tmp_path / f"{len(started)}.log"
        with log.open("w") as output:
            process = subprocess.Popen(
                argv or command.argv,
                env={**os.environ, **dict(command.env)},
                cwd=tmp_path,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        started.append(process)
        process.log = log
        return process

    yield start
    for process in started:
        with contextlib.suppress(psutil.NoSuchProcess):
            for each in psutil.Process(process.pid).children(recursive=True):
                each.kill()
        process.kill()
        process.wait()


@pytest.fixture
def saved_steps(tmp_path, wait_until):
    """Wait until training has saved within an epoch."""
    return lambda: wait_until(lambda: list((tmp_path / "run").glob("checkpoint_e0000_*.pt")))


def rank_1(process, launcher):
    """Return the process that is rank 1 of what launcher has started."""
    for each in psutil.Process(process.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            name = RANK_VARIABLES[launcher]
            if each.environ().get(name) == "1" and not each.children():
                return each
    raise AssertionError("no rank 1")


def output_of(process):
    process.wait(timeout=80)
    return process.log.read_text()


def check_finished(process, folder, uninterrupted):
    """The run continued within an epoch and ended with the parameters of one without a break."""
    text = output_of(process)
    assert process.returncode == 0, text
    assert re.search(r"continuing .*checkpoint_e\S* with epoch \d, step \d+", text), text
    results = read_results(folder / "results")
    assert [each["parameters"] for each in results] == [uninterrupted] * 2


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGKILL, id="SIGKILL"),
        pytest.param(signal.SIGTERM, id="SIGTERM", marks=pytest.mark.long),
    ],
)
def test_torchrun_starts_the_ranks_again_when_one_has_ended(
    job, start, saved_steps, tmp_path, uninterrupted, number
):
    (command,) = torchrun(replace(job, max_restarts=1))
    process = start(command)
    saved_steps()
    rank_1(process, "torchrun").send_signal(number)
    check_finished(process, tmp_path, uninterrupted)


def test_mpirun_ends_when_a_rank_is_killed_and_the_same_command_goes_on(
    job, start, saved_steps, tmp_path, uninterrupted
):
    (command,) = plan("mpirun", job)
    process = start(command)
    saved_steps()
    rank_1(process, "mpirun").kill()
    text = output_of(process)
    assert process.returncode != 0, text
    check_finished(start(command), tmp_path, uninterrupted)


@pytest.mark.parametrize(
    ("launcher", "number", "status"),
    [
        pytest.param("torchrun", signal.SIGTERM, 1, marks=pytest.mark.long),
        ("mpirun", signal.SIGUSR1, train_resnet.STOPPED),
    ],
)
def test_a_signal_to_the_launcher_saves_and_the_same_command_goes_on(
    job, start, saved_steps, tmp_path, uninterrupted, launcher, number, status
):
    (command,) = plan(launcher, job)
    process = start(command)
    saved_steps()
    process.send_signal(number)
    text = output_of(process)
    assert process.returncode == status, text
    assert len(STOPPED.findall(text)) == 1
    check_finished(start(command), tmp_path, uninterrupted)


def typed(cluster, start, command):
    """Type command on its node, with its variables."""
    variables = [f"{name}={value}" for name, value in command.env]
    argv = on_node(cluster, command.host, ["env", *variables, *command.argv])
    return start(command, argv)


def ids(cluster, node, of_agent):
    """Return the ids of torchrun's agent on node, or of the ranks there."""
    return [
        pid
        for pid, line in processes(cluster)[node]
        if MODULE in line and ("torch.distributed.run" in line) is of_agent
    ]


def test_a_node_that_is_lost_and_started_again_joins_the_other(
    job, cluster, start, saved_steps, tmp_path, uninterrupted
):
    job = replace(job, hosts=cluster.hosts(1), rdzv="c10d", max_restarts=1)
    commands = torchrun(job)
    first, lost = (typed(cluster, start, command) for command in commands)
    saved_steps()
    for of_agent in (True, False):
        for pid in ids(cluster, "node2", of_agent):
            os.kill(pid, signal.SIGKILL)
    lost.wait(timeout=20)
    again = typed(cluster, start, commands[1])
    check_finished(first, tmp_path, uninterrupted)
    assert again.wait(timeout=20) == 0


@pytest.mark.long
def test_the_ranks_of_a_lost_agent_train_on_and_are_saved_when_a_new_one_joins(
    job, cluster, start, saved_steps, tmp_path, wait_until
):
    args = tuple("1000" if word == "1" else word for word in job.args)  # --epochs
    hosts = cluster.hosts(1)
    commands = torchrun(replace(job, args=args, hosts=hosts, rdzv="c10d", max_restarts=1))
    first, lost = (typed(cluster, start, command) for command in commands)
    saved_steps()
    for pid in ids(cluster, "node2", of_agent=True):
        os.kill(pid, signal.SIGKILL)
    lost.wait(timeout=20)
    typed(cluster, start, commands[1])
    wait_until(lambda: "\ncontinuing " in first.log.read_text(), 60)
    assert len(STOPPED.findall(first.log.read_text())) == 1
    for node in ("node1", "node2"):
        for pid in [*ids(cluster, node, of_agent=True), *ids(cluster, node, of_agent=False)]:
            os.kill(pid, signal.SIGKILL)


@pytest.mark.long
def test_a_job_that_slurm_cancels_is_saved_and_the_same_command_goes_on(
    slurm, job, cluster, start, saved_steps, tmp_path, uninterrupted
):
    (command,) = srun(replace(job, hosts=cluster.hosts(1)))
    process = typed(cluster, start, command)
    saved_steps()
    subprocess.run(on_node(cluster, "node1", ["scancel", "--user=root"]), check=True, timeout=20)
    text = output_of(process)
    assert process.returncode != 0, text
    assert len(STOPPED.findall(text)) == 1, text
    check_finished(typed(cluster, start, command), tmp_path, uninterrupted)


def test_srun_ends_when_a_rank_is_killed_and_the_same_command_goes_on(
    slurm, job, cluster, start, saved_steps, tmp_path, uninterrupted
):
    (command,) = srun(replace(job, hosts=cluster.hosts(1)))
    process = typed(cluster, start, command)
    saved_steps()
    for pid in ids(cluster, "node2", of_agent=False):
        os.kill(pid, signal.SIGKILL)
    text = output_of(process)
    assert process.returncode != 0, text
    check_finished(typed(cluster, start, command), tmp_path, uninterrupted)
