"""Every launcher's commands, byte for byte, for two invented nodes and for this machine."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from ddp_helpers.launch.commands import (
    LAUNCHERS,
    HostCommand,
    Job,
    mpirun,
    plan,
    sbatch,
    srun,
    threads,
    torch_distributed_launch,
    torchrun,
)
from ddp_helpers.launch.hosts import Host, HostfileError, local
from ddp_helpers.launch.mpi import Mpi

OPEN_MPI_5 = Mpi("Open MPI", (5, 0, 11), "/env/bin/mpirun")
OPEN_MPI_4 = Mpi("Open MPI", (4, 1, 4), "/usr/bin/mpirun")
MPICH = Mpi("MPICH", (4, 0, 2), "/usr/bin/mpirun")
INTEL_MPI = Mpi("Intel MPI", (2021, 19, 0), "/usr/bin/mpirun")

NODES = (Host("node-a", 2), Host("node-b", 2))
UNEQUAL = (Host("node-a", 2), Host("node-b", 1))
HERE = Job("train.py", ("--epochs", "3"), hosts=local(2), python="python")
TWO_NODES = replace(HERE, hosts=NODES)


def lines(commands):
    return [f"{command.host}$ {command}" for command in commands]


@pytest.mark.parametrize(
    ("function", "module"),
    [(torchrun, "torch.distributed.run"), (torch_distributed_launch, "torch.distributed.launch")],
)
def test_torch_launchers_get_one_command_per_host_with_its_node_rank(function, module):
    assert lines(function(HERE)) == [
        f"localhost$ python -m {module} --standalone --local-addr=127.0.0.1"
        " --nproc-per-node=2 train.py --epochs 3"
    ]
    assert lines(function(TWO_NODES)) == [
        f"node-a$ python -m {module} --nnodes=2 --node-rank=0 --master-addr=node-a"
        " --master-port=29500 --nproc-per-node=2 train.py --epochs 3",
        f"node-b$ python -m {module} --nnodes=2 --node-rank=1 --master-addr=node-a"
        " --master-port=29500 --nproc-per-node=2 train.py --epochs 3",
    ]


def test_the_c10d_rendezvous_has_its_host_and_no_node_rank():
    assert lines(torchrun(replace(TWO_NODES, rdzv="c10d", master_port=4000))) == [
        f"{host}$ python -m torch.distributed.run --nnodes=2 --rdzv-backend=c10d"
        f" --rdzv-endpoint=node-a:4000 --rdzv-id=4000 --rdzv-conf=is_host={is_host}"
        " --nproc-per-node=2 train.py --epochs 3"
        for host, is_host in (("node-a", 1), ("node-b", 0))
    ]


def test_restarts_are_asked_of_each_agent_and_c10d_gets_a_new_store_for_each():
    assert lines(torchrun(replace(HERE, max_restarts=2))) == [
        "localhost$ python -m torch.distributed.run --standalone --local-addr=127.0.0.1"
        " --max-restarts=2 --nproc-per-node=2 train.py --epochs 3"
    ]
    for rdzv, variable in [("static", ""), ("c10d", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 ")]:
        for line in lines(torchrun(replace(TWO_NODES, rdzv=rdzv, max_restarts=1))):
            assert f"$ {variable}python -m torch.distributed.run --nnodes=2 " in line
            assert " --max-restarts=1 --nproc-per-node=2 train.py --epochs 3" in line


def test_a_batch_file_is_whole_and_quotes_what_a_shell_would_read():
    job = replace(TWO_NODES, target="dir/my train.py", args=("a b", "$x;"), env={"WORD": "it's"})
    assert sbatch(job) == (
        "#!/bin/bash\n"
        "#SBATCH --job-name=my_train.py\n"
        "#SBATCH --nodes=2\n"
        "#SBATCH --ntasks-per-node=2\n"
        "#SBATCH --cpus-per-task=4\n"
        "##SBATCH --gpus-per-node=2   # with GPUs: one # less, and one GPU for each rank\n"
        "#SBATCH --time=01:00:00\n"
        "#SBATCH --output=%x-%j.out\n"
        "\n"
        "# The first node of the job, and a port that no other job of this node takes.\n"
        'export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)\n'
        "export MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))\n"
        "export OMP_NUM_THREADS=1\n"
        "export WORD='it'\"'\"'s'\n"
        "\n"
        "# One rank that fails ends the others.\n"
        "srun --kill-on-bad-exit=1 --export=ALL python 'dir/my train.py' 'a b' '$x;'\n"
    )


MASTER_X = "-x MASTER_ADDR=node-a -x MASTER_PORT=29500 -x OMP_NUM_THREADS=1"
MASTER_GENV = "-genv MASTER_ADDR node-a -genv MASTER_PORT 29500 -genv OMP_NUM_THREADS 1"
TRAIN = "python train.py --epochs 3"


@pytest.mark.parametrize(
    ("mpi", "hosts", "line"),
    [
        (
            OPEN_MPI_5,
            local(2),
            "localhost$ /env/bin/mpirun -n 2 --bind-to none --map-by slot:oversubscribe"
            f" -x OMP_NUM_THREADS=1 {TRAIN}",
        ),
        (
            OPEN_MPI_4,
            local(2),
            "localhost$ /usr/bin/mpirun -n 2 --bind-to none --map-by slot:oversubscribe"
            f" -x OMP_NUM_THREADS=1 {TRAIN}",
        ),
        (
            MPICH,
            local(2),
            f"localhost$ /usr/bin/mpirun -n 2 -bind-to none -genv OMP_NUM_THREADS 1 {TRAIN}",
        ),
        (
            INTEL_MPI,
            local(2),
            f"localhost$ /usr/bin/mpirun -n 2 -genv I_MPI_PIN 0 -genv OMP_NUM_THREADS 1 {TRAIN}",
        ),
        (
            OPEN_MPI_5,
            NODES,
            "node-a$ /env/bin/mpirun -n 4 -H node-a:2,node-b:2 --bind-to none --map-by slot"
            f" {MASTER_X} {TRAIN}",
        ),
        (
            OPEN_MPI_4,
            NODES,
            "node-a$ /usr/bin/mpirun -n 4 -H node-a:2,node-b:2 --bind-to none --map-by slot"
            f" {MASTER_X} {TRAIN}",
        ),
        (
            MPICH,
            NODES,
            "node-a$ /usr/bin/mpirun -n 4 -hosts node-a,node-b -ppn 2 -bind-to none"
            f" {MASTER_GENV} {TRAIN}",
        ),
        (
            INTEL_MPI,
            NODES,
            "node-a$ /usr/bin/mpirun -n 4 -hosts node-a,node-b -ppn 2 -genv I_MPI_PIN 0"
            f" {MASTER_GENV} {TRAIN}",
        ),
        (
            OPEN_MPI_5,
            UNEQUAL,
            "node-a$ /env/bin/mpirun -n 3 -H node-a:2,node-b:1 --bind-to none --map-by slot"
            f" {MASTER_X} {TRAIN}",
        ),
        (
            MPICH,
            UNEQUAL,
            "node-a$ /usr/bin/mpirun -n 3 -hosts node-a:2,node-b:1 -bind-to none"
            f" {MASTER_GENV} {TRAIN}",
        ),
        (
            INTEL_MPI,
            UNEQUAL,
            "node-a$ /usr/bin/mpirun -n 3 -hosts node-a:2,node-b:1 -genv I_MPI_PIN 0"
            f" {MASTER_GENV} {TRAIN}",
        ),
        (
            OPEN_MPI_5,
            (Host("node-a", 2),),
            "node-a$ /env/bin/mpirun -n 2 -H node-a:2 --bind-to none --map-by slot"
            f" -x OMP_NUM_THREADS=1 {TRAIN}",
        ),
        (
            INTEL_MPI,
            (Host("node-a", 2),),
            "node-a$ /usr/bin/mpirun -n 2 -hosts node-a -ppn 2 -genv I_MPI_PIN 0"
            f" -genv OMP_NUM_THREADS 1 {TRAIN}",
        ),
    ],
    ids=lambda value: getattr(value, "flavour", None),
)
def test_mpirun_gets_one_command_in_the_options_of_its_flavour(mpi, hosts, line):
    assert lines(mpirun(replace(HERE, hosts=hosts), mpi)) == [line]


@pytest.mark.parametrize(
    ("hosts", "line"),
    [
        (
            local(2),
            f"localhost$ OMP_NUM_THREADS=1 srun --nodes=1 --ntasks-per-node=2 --export=ALL {TRAIN}",
        ),
        (
            NODES,
            "node-a$ MASTER_ADDR=node-a MASTER_PORT=29500 OMP_NUM_THREADS=1 srun --nodes=2"
            f" --ntasks-per-node=2 --nodelist=node-a,node-b --export=ALL {TRAIN}",
        ),
    ],
)
def test_srun_gets_one_command(hosts, line):
    assert lines(srun(replace(HERE, hosts=hosts))) == [line]


def test_srun_cannot_place_unequal_slots():
    with pytest.raises(HostfileError) as caught:
        srun(replace(HERE, hosts=UNEQUAL))
    assert str(caught.value) == (
        "hosts node-a:2,node-b:1: srun starts the same number of ranks on every node.\n"
        "Give every host the same slots, or use mpirun or torchrun."
    )


def test_every_torchrun_has_one_thread_per_rank_also_where_a_host_has_one_rank():
    # torchrun sets OMP_NUM_THREADS=1 only for two or more ranks on a host.
    first, second = torchrun(replace(HERE, hosts=UNEQUAL))
    assert first.env == ()
    assert second.env == (("OMP_NUM_THREADS", "1"),)
    assert str(second).startswith("OMP_NUM_THREADS=1 python -m torch.distributed.run --nnodes=2 ")


def test_a_number_of_threads_of_the_users_own_is_kept_under_every_launcher():
    job = replace(TWO_NODES, env=threads({"OMP_NUM_THREADS": "4", "HOME": "/root"}))
    assert [str(command).split()[0] for command in torchrun(job)] == ["OMP_NUM_THREADS=4"] * 2
    assert " -x OMP_NUM_THREADS=4 " in str(mpirun(job, OPEN_MPI_5)[0])
    assert " -genv OMP_NUM_THREADS 4 " in str(mpirun(job, MPICH)[0])
    assert " OMP_NUM_THREADS=4 srun " in str(srun(job)[0])
    assert threads({}) == {}


def test_the_master_can_be_named():
    job = replace(TWO_NODES, master_addr="10.77.0.1", master_port=29511)
    assert " --master-addr=10.77.0.1 --master-port=29511 " in str(torchrun(job)[1])
    assert " -x MASTER_ADDR=10.77.0.1 -x MASTER_PORT=29511 " in str(mpirun(job, OPEN_MPI_5)[0])


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_module_is_started_with_m(launcher):
    job = replace(HERE, target="package.train", module=True)
    (command,) = plan(launcher, job)
    assert command.argv[-4:] == ("-m", "package.train", "--epochs", "3")


def test_the_default_interpreter_is_the_running_one():
    assert Job("train.py").python == sys.executable


NASTY = ("two words", "it's", 'say "hi"', "$HOME", "a;b", "*", "", "--nproc-per-node=7", "ü\n")

SHOW = """\
import json, os, sys
text = json.dumps({"argv": sys.argv[1:], "value": os.environ.get("VALUE")}) + "\\n"
os.write(1, text.encode())
"""


@pytest.mark.parametrize(
    "make",
    [
        torchrun,
        torch_distributed_launch,
        srun,
        lambda job: mpirun(job, OPEN_MPI_5),
        lambda job: mpirun(job, MPICH),
        lambda job: mpirun(job, INTEL_MPI),
    ],
    ids=["torchrun", "torch.distributed.launch", "srun", "Open MPI", "MPICH", "Intel MPI"],
)
def test_a_pasted_command_gives_the_shell_every_value_unchanged(tmp_path, make):
    value = " ".join(NASTY)
    job = replace(TWO_NODES, args=NASTY, env={"VALUE": value}, python="python")
    for command in make(job):
        # A program that shows its arguments stands in for the launcher.
        stub = tmp_path / os.path.basename(command.argv[0])
        stub.write_text(f"#!{sys.executable}\n{SHOW}")
        stub.chmod(0o755)
        stand_in = replace(command, argv=(stub.name, *command.argv[1:]))
        done = subprocess.run(
            ["sh", "-c", str(stand_in)],
            env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
            capture_output=True,
            text=True,
            check=True,
        )
        seen = json.loads(done.stdout)
        assert seen["argv"] == list(command.argv[1:])
        assert seen["argv"][-len(NASTY) :] == list(NASTY)
        if command.env:
            assert seen["value"] == value


@pytest.mark.launcher
@pytest.mark.parametrize("launcher", ["torchrun", "torch.distributed.launch", "mpirun"])
def test_a_rank_gets_every_value_of_a_pasted_command_unchanged(tmp_path, launcher):
    script = tmp_path / "show values.py"
    script.write_text(SHOW)
    job = Job(str(script), NASTY, hosts=local(1), env={"VALUE": "two words; $HOME 'it' \"x\" a,b"})
    (command,) = plan(launcher, job)
    done = subprocess.run(
        ["sh", "-c", str(command)], capture_output=True, text=True, check=True, timeout=60
    )
    seen = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    first = ["--local-rank=0"] if launcher == "torch.distributed.launch" else []
    assert seen == {"argv": [*first, *NASTY], "value": job.env["VALUE"]}


@pytest.mark.parametrize("kind", ["named", "lambda"])
def test_B47_a_function_of_a_notebook_is_refused_with_the_cell_to_write(kind):
    """https://github.com/pytorch/pytorch/issues/55763: spawned ranks do not find it."""

    def epoch():
        pass

    function, file = {"named": (epoch, "epoch.py"), "lambda": (lambda: 0, "train.py")}[kind]
    with pytest.raises(TypeError) as caught:
        Job(function, hosts=local(2))
    seen, fix = str(caught.value).splitlines()
    assert seen.endswith(" is a function, but ranks are new processes, which run a file.")
    assert fix.startswith(f"Begin its cell with %%writefile {file}, call it in the last line")
    assert fix.endswith(f'Job("{file}")')


def test_a_command_is_a_frozen_value():
    command = HostCommand("node-a", ("python", "a b"), (("NAME", "x y"),))
    assert str(command) == "NAME='x y' python 'a b'"
    assert command == HostCommand("node-a", ("python", "a b"), (("NAME", "x y"),))
