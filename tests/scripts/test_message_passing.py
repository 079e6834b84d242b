"""The sources' example, started by each launcher as a user would type it."""

import socket
import subprocess
import sys

import pytest

import ddp_helpers.scripts.message_passing as message_passing
from ddp_helpers.launch.mpi import find_mpirun
from ddp_helpers.results import read_results

MODULE = ("-m", message_passing.__name__)
PATH = (message_passing.__file__,)


def torch_launcher(name):
    return lambda n: [sys.executable, "-m", name, "--standalone", f"--nproc_per_node={n}"]


def mpirun(n):
    options = ["-np", str(n), "--map-by", "slot:oversubscribe", "--bind-to", "none"]
    return [find_mpirun().path, *options, sys.executable]


LAUNCHERS = {
    "torchrun": torch_launcher("torch.distributed.run"),
    "torch.distributed.launch": torch_launcher("torch.distributed.launch"),
    "mpirun": mpirun,
}
SAID_BY_RANK_0 = [f"[rank 0] sent 42.0 to rank {rank}" for rank in (1, 2, 3)]


def run(command):
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_one_process_holds_the_number_without_a_launcher(tmp_path, capsys):
    message_passing.main(["--backend", "gloo", "--result_dir", str(tmp_path)])
    (result,) = read_results(tmp_path)
    assert result["number"] == 42.0
    assert result["launcher"] == "python"
    assert result["backend"] == "gloo"


@pytest.mark.launcher
@pytest.mark.parametrize("script", [MODULE, PATH], ids=["module", "path"])
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_every_rank_holds_the_number_rank_0_sent(launcher, script, tmp_path):
    done = run([*LAUNCHERS[launcher](4), *script, "--backend=gloo", f"--result-dir={tmp_path}"])
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("[rank")]
    assert [line for line in lines if line.startswith("[rank 0]")] == SAID_BY_RANK_0
    for rank in (1, 2, 3):
        assert f"[rank {rank}] received 42.0 from rank 0" in lines
    results = read_results(tmp_path)
    assert [result["number"] for result in results] == [42.0] * 4
    assert [result["local_rank"] for result in results] == [0, 1, 2, 3]
    assert {result["launcher"] for result in results} == {
        "Open MPI" if launcher == "mpirun" else "torchrun"
    }


@pytest.mark.launcher
def test_B19_two_jobs_at_once_on_one_machine_do_not_meet(tmp_path):
    """https://github.com/meta-pytorch/torchtune/issues/1025: a second job on one machine."""
    jobs = [
        subprocess.Popen(
            [*mpirun(2), *MODULE, f"--result_dir={tmp_path / str(job)}"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for job in range(2)
    ]
    for job in jobs:
        _, errors = job.communicate(timeout=120)
        assert job.returncode == 0, errors
    for job in range(2):
        assert [result["number"] for result in read_results(tmp_path / str(job))] == [42.0] * 2


BAD_INPUT = {
    "a port that is none": (
        {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "99999"},
        "error: MASTER_PORT=99999, expected a port number from 1 to 65535",
    ),
    "a name that does not resolve": (
        {"MASTER_ADDR": "no-such-host.invalid", "MASTER_PORT": "29500"},
        "error: MASTER_ADDR=no-such-host.invalid does not resolve",
    ),
    "a rank beyond the world": (
        {"RANK": "2", "WORLD_SIZE": "2"},
        "error: RANK=2, expected 0 <= RANK < 2 (WORLD_SIZE).",
    ),
    "one of Open MPI's variables missing": (
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"},
        "error: OMPI_COMM_WORLD_LOCAL_RANK, OMPI_COMM_WORLD_LOCAL_SIZE not set",
    ),
}
BY_HAND = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}


RUN = f"import runpy; runpy.run_module({MODULE[1]!r}, run_name='__main__')"


@pytest.mark.launcher
@pytest.mark.parametrize(("variables", "message"), BAD_INPUT.values(), ids=BAD_INPUT)
def test_bad_input_is_answered_in_one_message(start_ranks, variables, message):
    (done,) = start_ranks(RUN, [{**BY_HAND, **variables}])
    assert_one_message(done, message)


@pytest.mark.launcher
def test_a_port_in_use_is_answered_in_one_message(start_ranks):
    with socket.create_server(("", 0)) as server:
        port = str(server.getsockname()[1])
        taken = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        (done,) = start_ranks(RUN, [{**BY_HAND, **taken}])
    assert_one_message(done, f"error: MASTER_PORT={port} is in use on ")


def assert_one_message(done, message):
    assert done.status == 1
    assert done.output.startswith(message)
    assert len(done.output.splitlines()) <= 3
    assert done.seconds < 10
