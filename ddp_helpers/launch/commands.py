"""The exact commands that start a job, as data: to print, to paste, or to run.

    job = Job("train.py", ("--epochs", "3"), hosts=(Host("node-a", 2), Host("node-b", 2)))
    for command in torchrun(job):
        print(f"{command.host}$ {command}")

torchrun and torch.distributed.launch have to be typed on every host: one command per host.
mpirun and srun start the other hosts' ranks themselves: one command in all.
Lesson: notebooks/05_three_launchers.ipynb, notebooks/06_two_nodes.ipynb
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from .hosts import Host, HostfileError, local
from .mpi import Mpi, find_mpirun

LAUNCHERS = ("torchrun", "torch.distributed.launch", "mpirun", "srun")


@dataclass(frozen=True)
class Job:
    """What to start, where, and with which variables."""

    target: str  # the path of a script, or the name of a module
    args: tuple[str, ...] = ()
    module: bool = False
    hosts: tuple[Host, ...] = local(1)
    python: str = sys.executable  # the same path on every host
    master_addr: str | None = None  # None: the first host
    master_port: int = 29500  # used when there are several hosts
    rdzv: str = "static"  # how torchrun's agents meet: "static" or "c10d"
    max_restarts: int = 0  # how often torchrun's agents start ranks again that have failed
    env: Mapping[str, str] = field(default_factory=dict)  # must reach every rank

    def __post_init__(self) -> None:
        if callable(self.target):
            name = self.target.__name__
            file = f"{name if name.isidentifier() else 'train'}.py"
            raise TypeError(
                f"{name} is a function, but ranks are new processes, which run a file.\n"
                f"Begin its cell with %%writefile {file}, call it in the last line, and then:"
                f' Job("{file}")'
            )

    @property
    def world_size(self) -> int:
        """The number of ranks on all hosts."""
        return sum(host.slots for host in self.hosts)

    @property
    def program(self) -> tuple[str, ...]:
        """What follows the interpreter."""
        return (*(("-m",) if self.module else ()), self.target, *self.args)


@dataclass(frozen=True)
class HostCommand:
    """One command line and the host to type it on; str() gives text for a shell."""

    host: str
    argv: tuple[str, ...]
    env: tuple[tuple[str, str], ...] = ()
    mpi: Mpi | None = None  # the mpirun that argv starts

    def __str__(self) -> str:
        assignments = [f"{name}={shlex.quote(value)}" for name, value in self.env]
        return " ".join([*assignments, shlex.join(self.argv)])


def plan(launcher: str, job: Job) -> list[HostCommand]:
    """Return the commands that start job under one of LAUNCHERS.

    Raises LauncherNotFound when there is no mpirun to ask for its flavour, and HostfileError
    when the launcher cannot place ranks on hosts like these.
    """
    if launcher == "mpirun":
        return mpirun(job, find_mpirun())
    others = {
        "torchrun": torchrun,
        "torch.distributed.launch": torch_distributed_launch,
        "srun": srun,
    }
    return others[launcher](job)


def torchrun(job: Job) -> list[HostCommand]:
    """Return one torchrun command per host."""
    return _torch("torch.distributed.run", job)


def torch_distributed_launch(job: Job) -> list[HostCommand]:
    """Return one torch.distributed.launch command per host: the name torchrun had before."""
    return _torch("torch.distributed.launch", job)


def _torch(launcher: str, job: Job) -> list[HostCommand]:
    restart_env = {}
    if job.max_restarts and job.rdzv == "c10d" and len(job.hosts) > 1:
        # Agents that met before do not tell one that takes a lost one's place where rank 0 is,
        # and it waits in vain, unless rank 0 opens a new store each time.
        restart_env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    commands = []
    for node_rank, host in enumerate(job.hosts):
        # The interpreter's own torchrun: one found on PATH may belong to another environment.
        argv = (job.python, "-m", launcher, *_torch_meeting(job, node_rank))
        if job.max_restarts:
            argv += (f"--max-restarts={job.max_restarts}",)
        argv += (f"--nproc-per-node={host.slots}", *job.program)
        # torchrun sets OMP_NUM_THREADS=1 itself, but not when a host has a single rank.
        env = _with_one_thread(job.env) if host.slots == 1 else job.env
        commands.append(HostCommand(host.name, argv, tuple({**restart_env, **env}.items())))
    return commands


def _torch_meeting(job: Job, node_rank: int) -> tuple[str, ...]:
    """Return the options that say where the ranks meet."""
    if len(job.hosts) == 1:
        # --standalone takes a free port. Alone it publishes the machine's name as MASTER_ADDR,
        # and where that name does not resolve the job waits until it gives up.
        return ("--standalone", "--local-addr=127.0.0.1")
    master_addr = job.master_addr or job.hosts[0].name
    if job.rdzv == "c10d":
        # The agents number the nodes themselves: rank 0 may be on any host. Without is_host each
        # would look for its own name in the endpoint, in vain where it is an alias or 127.0.1.1.
        return (
            f"--nnodes={len(job.hosts)}",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={master_addr}:{job.master_port}",
            f"--rdzv-id={job.master_port}",
            f"--rdzv-conf=is_host={int(node_rank == 0)}",
        )
    # The static rendezvous obeys --node-rank, so that rank 0 is on the first host.
    return (
        f"--nnodes={len(job.hosts)}",
        f"--node-rank={node_rank}",
        f"--master-addr={master_addr}",
        f"--master-port={job.master_port}",
    )


def mpirun(job: Job, mpi: Mpi) -> list[HostCommand]:
    """Return one mpirun command for all hosts, in the options of mpi's flavour."""
    variables = {**_master(job), **_with_one_thread(job.env)}
    if mpi.flavour == "Open MPI":
        options = _open_mpi(job, variables)
    else:
        options = _hydra(job, variables, mpi)
    argv = (mpi.path, *options, job.python, *job.program)
    return [HostCommand(job.hosts[0].name, argv, mpi=mpi)]


def _open_mpi(job: Job, variables: Mapping[str, str]) -> list[str]:
    options = ["-n", str(job.world_size)]
    if job.hosts == local(job.world_size):
        # More ranks than cores are welcome on a laptop. (--oversubscribe would give local
        # ranks 0,2,1,3 with Open MPI 5.)
        placement = "slot:oversubscribe"
    else:
        options += ["-H", ",".join(f"{host.name}:{host.slots}" for host in job.hosts)]
        placement = "slot"
    # Bound to one core, as is the default, a rank's threads would share it.
    options += ["--bind-to", "none", "--map-by", placement]
    for name, value in variables.items():
        options += ["-x", f"{name}={value}"]
    return options


def _hydra(job: Job, variables: Mapping[str, str], mpi: Mpi) -> list[str]:
    options = ["-n", str(job.world_size)]
    names = [host.name for host in job.hosts]
    slots = {host.slots for host in job.hosts}
    if job.hosts != local(job.world_size) and len(slots) == 1:
        options += ["-hosts", ",".join(names), "-ppn", str(slots.pop())]
    elif len(slots) > 1:
        options += ["-hosts", ",".join(f"{host.name}:{host.slots}" for host in job.hosts)]
    if mpi.flavour == "Intel MPI":  # it does not obey -bind-to none
        variables = {"I_MPI_PIN": "0", **variables}
    else:
        options += ["-bind-to", "none"]
    for name, value in variables.items():
        options += ["-genv", name, value]
    return options


def srun(job: Job) -> list[HostCommand]:
    """Return one srun command for all hosts. Raises HostfileError when slots differ."""
    slots = {host.slots for host in job.hosts}
    if len(slots) > 1:
        seen = ",".join(f"{host.name}:{host.slots}" for host in job.hosts)
        raise HostfileError(
            f"hosts {seen}: srun starts the same number of ranks on every node.\n"
            "Give every host the same slots, or use mpirun or torchrun."
        )
    options = [f"--nodes={len(job.hosts)}", f"--ntasks-per-node={slots.pop()}"]
    if job.hosts != local(job.world_size):
        options.append(f"--nodelist={','.join(host.name for host in job.hosts)}")
    # In front of srun a variable may hold a comma; inside --export= it may not.
    env = {**_master(job), **_with_one_thread(job.env)}
    argv = ("srun", *options, "--export=ALL", job.python, *job.program)
    return [HostCommand(job.hosts[0].name, argv, tuple(env.items()))]


def sbatch(job: Job) -> str:
    """Return a batch file that runs job on as many nodes as it has hosts: Slurm chooses which.

    Raises HostfileError when slots differ. Source: sbatch(1).
    """
    (command,) = srun(job)
    nodes, ranks = command.argv[1:3]
    variables = _with_one_thread(job.env)
    exports = [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
    return "\n".join(
        [
            "#!/bin/bash",
            f"#SBATCH --job-name={_job_name(job)}",
            f"#SBATCH {nodes}",
            f"#SBATCH {ranks}",
            "#SBATCH --cpus-per-task=4",
            "##SBATCH --gpus-per-node=2   # with GPUs: one # less, and one GPU for each rank",
            "#SBATCH --time=01:00:00",
            "#SBATCH --output=%x-%j.out",
            "",
            "# The first node of the job, and a port that no other job of this node takes.",
            'export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
            "export MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))",
            *exports,
            "",
            "# One rank that fails ends the others.",
            f"srun --kill-on-bad-exit=1 --export=ALL {shlex.join((job.python, *job.program))}",
            "",
        ]
    )


def _job_name(job: Job) -> str:
    """Return the script's or module's name, without what sbatch would split at."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", job.target.rsplit("/", 1)[-1])


def _master(job: Job) -> dict[str, str]:
    """Return MASTER_ADDR and MASTER_PORT; neither is needed when there is one host."""
    if len(job.hosts) == 1:
        return {}
    return {
        "MASTER_ADDR": job.master_addr or job.hosts[0].name,
        "MASTER_PORT": str(job.master_port),
    }


def threads(environ: Mapping[str, str]) -> dict[str, str]:
    """Return OMP_NUM_THREADS if environ has it, as the env of a Job.

    torchrun's ranks inherit it; without this, ranks under mpirun would have 1 thread.
    """
    name = "OMP_NUM_THREADS"
    return {name: environ[name]} if name in environ else {}


def _with_one_thread(env: Mapping[str, str]) -> dict[str, str]:
    """Return env with torchrun's default of one OpenMP thread, unless env has its own number.

    Equal thread counts give equal floating-point results under every launcher.
    """
    return {"OMP_NUM_THREADS": "1", **env}
