"""The commands people know from guides: with two agents on this machine, and on two real nodes.

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
from ddp_helpers.launch.practice_cluster import on_node
from ddp_helpers.results import read_results

pytestmark = pytest.mark.launcher

TORCH = (
    "{python} -m {launcher} --nproc_per_node=2 --nnodes=2 --node_rank={node_rank}"
    " --master_addr={master} --master_port={port} {script}"
)
MPIRUN = (
    "{mpirun} -np 4 -H {hosts} -x MASTER_ADDR={master} -x MASTER_PORT={port} -x PATH"
    " --bind-to none --map-by slot -mca pml ob1 -mca btl ^openib {python} {script}"
)
TWO_RANKS = (
    "{mpirun} -np 2 -H localhost:2 -x MASTER_ADDR={master} -x MASTER_PORT={port} -x PATH"
    " -x OMP_NUM_THREADS=1 --bind-to none --map-by slot {python} {script}"
)
TWO_AGENTS = {
    launcher: [TORCH.replace("{launcher}", launcher).replace("{node_rank}", n) for n in "01"]
    for launcher in ("torch.distributed.launch", "torch.distributed.run")
}
COMMANDS = {**TWO_AGENTS, "mpirun": [MPIRUN]}


def run_together(lines, places, **known):
    """Start the command lines together, each in its place; return what they printed, in order.

    A place turns the words of a command into those that run it there.
    """
    if any("{mpirun}" in line for line in lines):
        known["mpirun"] = find_mpirun().path
    processes = [
        subprocess.Popen(
            place(shlex.split(line.format(python=sys.executable, **known))),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for line, place in zip(lines, places, strict=False)  # mpirun is typed once
    ]
    try:
        outputs = [process.communicate(timeout=240)[0] for process in processes]
    finally:
        for process in processes:
            process.terminate()  # SIGTERM, so that a launcher stops its workers
            process.wait()
    assert [process.returncode for process in processes] == [0] * len(lines), outputs
    return outputs


@pytest.fixture
def run_here(free_port):
    """Run the lines for two nodes on this machine."""

    def run(lines, script):
        known = {"master": "127.0.0.1", "hosts": "localhost:4", "port": free_port}
        return run_together(lines, [list, list], **known, script=script)

    return run


@pytest.fixture
def run_on_nodes(cluster, free_port):
    """Run the first line on node1, the second on node2."""

    def run(lines, script):
        places = [lambda argv, n=node.name: on_node(cluster, n, argv) for node in cluster.nodes]
        known = {"master": "node1", "hosts": "node1:2,node2:2", "port": free_port}
        return run_together(lines, places, **known, script=script)

    return run


def assert_the_message_has_passed(outputs, results):
    assert "[rank 0] sent 42.0 to rank 3" in outputs[0]
    assert "[rank 3] received 42.0 from rank 0" in outputs[-1]
    assert [result["number"] for result in results] == [42.0] * 4


@pytest.mark.parametrize("launcher", COMMANDS)
def test_four_ranks_pass_a_message(launcher, run_here, tmp_path):
    script = f"{message_passing.__file__} --backend=gloo --result_dir={tmp_path}"
    outputs = run_here(COMMANDS[launcher], script)
    results = read_results(tmp_path)
    assert_the_message_has_passed(outputs, results)
    local_ranks = [0, 1, 2, 3] if launcher == "mpirun" else [0, 1, 0, 1]
    assert [result["local_rank"] for result in results] == local_ranks


@pytest.mark.parametrize("launcher", COMMANDS)
def test_four_ranks_on_two_nodes_pass_a_message(launcher, run_on_nodes, tmp_path):
    script = f"{message_passing.__file__} --backend=gloo --result_dir={tmp_path}"
    outputs = run_on_nodes(COMMANDS[launcher], script)
    results = read_results(tmp_path)
    assert_the_message_has_passed(outputs, results)
    places = [("node1", 0), ("node1", 1), ("node2", 0), ("node2", 1)]
    assert [(result["host"], result["local_rank"]) for result in results] == places


def test_two_nodes_train_on_digits_to_one_set_of_parameters_under_every_launcher(
    run_on_nodes, tmp_path
):
    options = "--backend=gloo --epochs=1 --image_size=8 --batch_size=128"
    for launcher, lines in COMMANDS.items():
        folder = tmp_path / launcher
        # One rank on each node: test_two_nodes.py has the other numbers, and launchers.
        lines = [line.replace("_node=2", "_node=1").replace("-np 4", "-np 2") for line in lines]
        lines = [line.replace("{hosts}", "node1:1,node2:1") for line in lines]
        run_on_nodes(lines, f"{train_resnet.__file__} {options} --result_dir={folder}")
    results = [one for launcher in COMMANDS for one in read_results(tmp_path / launcher)]
    assert len({one["parameters"] for one in results}) == 1
    assert [one["host"] for one in results] == ["node1", "node2"] * 3


@pytest.mark.parametrize(
    "lines", [TWO_AGENTS["torch.distributed.run"], [TWO_RANKS]], ids=["torchrun", "mpirun"]
)
def test_the_guides_resnet_options_are_understood(lines, run_here, tmp_path):
    lines = [line.replace("--nproc_per_node=2", "--nproc_per_node=1") for line in lines]
    options = "--backend=gloo --use_syn --batch_size=256 --arch=resnet18 --epochs=1 --image_size=8"
    outputs = run_here(lines, f"{train_resnet.__file__} {options} --result_dir={tmp_path}")
    assert "epoch 1/1  loss " in outputs[0]
    first, second = read_results(tmp_path)
    assert first["parameters"] == second["parameters"]
    assert first["images_per_s"] > 0
