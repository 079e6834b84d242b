"""The commands people know from guides, with two agents on this machine in place of two nodes.

Only host names, the backend, and the spelling of --bind-to and --map-by differ from the guides,
and the model is smaller.
"""

import shlex
import subprocess
import sys

import pytest

import ddp_helpers.scripts.message_passing as message_passing
import ddp_helpers.scripts.train_resnet as train_resnet
from ddp_helpers.launch.mpi import find_mpirun
from ddp_helpers.results import read_results

pytestmark = pytest.mark.launcher

TORCH = (
    "{python} -m {launcher} --nproc_per_node=2 --nnodes=2 --node_rank={node_rank}"
    " --master_addr=127.0.0.1 --master_port={port} {script}"
)
MPIRUN = (
    "{mpirun} -np 4 -H localhost:4 -x MASTER_ADDR=127.0.0.1 -x MASTER_PORT={port} -x PATH"
    " --bind-to none --map-by slot -mca pml ob1 -mca btl ^openib {python} {script}"
)
TWO_RANKS = (
    "{mpirun} -np 2 -H localhost:2 -x MASTER_ADDR=127.0.0.1 -x MASTER_PORT={port} -x PATH"
    " -x OMP_NUM_THREADS=1 --bind-to none --map-by slot {python} {script}"
)
TWO_AGENTS = [
    (launcher, [TORCH.replace("{launcher}", launcher).replace("{node_rank}", n) for n in "01"])
    for launcher in ("torch.distributed.launch", "torch.distributed.run")
]
COMMANDS = {**dict(TWO_AGENTS), "mpirun": [MPIRUN]}


def run_together(lines, port, script):
    """Start the command lines together, wait, and return what they printed, in their order."""
    known = {"python": sys.executable, "port": port, "script": script}
    if any("{mpirun}" in line for line in lines):
        known["mpirun"] = find_mpirun().path
    processes = [
        subprocess.Popen(
            shlex.split(line.format(**known)),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for line in lines
    ]
    try:
        outputs = [process.communicate(timeout=240)[0] for process in processes]
    finally:
        for process in processes:
            process.terminate()  # SIGTERM, so that a launcher stops its workers
            process.wait()
    assert [process.returncode for process in processes] == [0] * len(lines), outputs
    return outputs


@pytest.mark.parametrize("launcher", COMMANDS)
def test_four_ranks_pass_a_message(launcher, free_port, tmp_path):
    script = f"{message_passing.__file__} --backend=gloo --result_dir={tmp_path}"
    outputs = run_together(COMMANDS[launcher], free_port, script)
    assert "[rank 0] sent 42.0 to rank 3" in outputs[0]
    assert "[rank 3] received 42.0 from rank 0" in outputs[-1]
    results = read_results(tmp_path)
    assert [result["number"] for result in results] == [42.0] * 4
    local_ranks = [0, 1, 2, 3] if launcher == "mpirun" else [0, 1, 0, 1]
    assert [result["local_rank"] for result in results] == local_ranks


@pytest.mark.parametrize("lines", [TWO_AGENTS[1][1], [TWO_RANKS]], ids=["torchrun", "mpirun"])
def test_the_guides_resnet_options_are_understood(lines, free_port, tmp_path):
    lines = [line.replace("--nproc_per_node=2", "--nproc_per_node=1") for line in lines]
    options = "--backend=gloo --use_syn --batch_size=256 --arch=resnet18 --epochs=1 --image_size=8"
    script = f"{train_resnet.__file__} {options} --result_dir={tmp_path}"
    outputs = run_together(lines, free_port, script)
    assert "epoch 1/1  loss " in outputs[0]
    first, second = read_results(tmp_path)
    assert first["parameters"] == second["parameters"]
    assert first["images_per_s"] > 0
