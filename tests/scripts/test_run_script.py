"""python -m ddp_helpers run: a script written for torchrun runs unchanged."""

import subprocess
import sys

import pytest

from ddp_helpers.launch.mpi import find_mpirun
from ddp_helpers.scripts.run_script import torchrun_variables
from ddp_helpers.worker.environment import LaunchEnvironment

WRITTEN_FOR_TORCHRUN = """
import os, sys
import torch
import torch.distributed as dist

rank = int(os.environ["RANK"])
local_rank = int(os.environ["LOCAL_RANK"])
world_size = int(os.environ["WORLD_SIZE"])
assert os.environ["MASTER_ADDR"]
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
text = f"rank {rank} ({local_rank}) of {world_size}: {total.item():g} {sys.argv[1:]}\\n"
os.write(1, text.encode())
dist.destroy_process_group()
sys.exit(int(sys.argv[-1]))
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "written for torchrun.py"
    path.write_text(WRITTEN_FOR_TORCHRUN)
    return path


def run(*command):
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_a_rank_gets_the_variables_torchrun_would_set():
    env = LaunchEnvironment("Open MPI", 3, 4, 1, 2, None, "node-a", 29500)
    assert torchrun_variables(env) == {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "node-a",
        "MASTER_PORT": "29500",
    }


@pytest.mark.launcher
def test_it_runs_unchanged_under_mpirun(script):
    options = ("-np", "3", "--map-by", "slot:oversubscribe", "--bind-to", "none")
    us = (sys.executable, "-m", "ddp_helpers", "run")
    done = run(find_mpirun().path, *options, *us, script, "--lr", "0.1", "0")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        f"rank {rank} ({rank}) of 3: 3 ['--lr', '0.1', '0']" for rank in range(3)
    ]


@pytest.mark.launcher
def test_it_runs_without_a_launcher_and_keeps_its_exit_status(script):
    done = run(sys.executable, "-m", "ddp_helpers", "run", script, "7")
    assert done.stdout == "rank 0 (0) of 1: 1 ['7']\n"
    assert done.returncode == 7


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ((), "error: nothing to run: give SCRIPT or -m MODULE.\n"),
        (("missing.py",), "error: no script missing.py: give SCRIPT or -m MODULE.\n"),
    ],
)
def test_a_script_that_does_not_exist_is_wrong_use(target, message):
    done = run(sys.executable, "-m", "ddp_helpers", "run", *target)
    assert done.returncode == 2
    assert done.stderr == message
