"""python -m ddp_helpers launch: print the commands that start a job, or run them.

Lesson: notebooks/05_three_launchers.ipynb
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
from collections.abc import Callable
from dataclasses import replace

from .commands import LAUNCHERS, HostCommand, Job, plan, sbatch, threads
from .hosts import Host, HostfileError, local, parse_hosts, read_hostfile
from .mpi import LauncherNotFound, LauncherRefused
from .remote import HostUnreachable, free_port_on
from .runner import JobFailed, run_local

_EXAMPLES = """\
examples:
  launch train.py --epochs 3                                  print the torchrun command
  launch --launcher mpirun -n 4 --run train.py --epochs 3     run it on this machine
  launch --hosts node-a:2,node-b:2 -m package.train           one command for each host
  launch --hosts node-a:2,node-b:2 --run -m package.train     run them there over ssh
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `launch` to parser."""
    parser.usage = "%(prog)s [OPTIONS] (SCRIPT | -m MODULE) [ARGS ...]"
    parser.epilog = _EXAMPLES
    parser.allow_abbrev = False
    add_where(parser)
    parser.add_argument(
        "--rdzv", choices=("static", "c10d"), default="static", help="how torchrun's agents meet"
    )
    parser.add_argument(
        "--max-restarts",
        type=_count,
        metavar="N",
        help="torchrun starts failed ranks again, N times",
    )
    parser.add_argument("--master-addr", metavar="A", help="the first host, as the others see it")
    parser.add_argument("--master-port", type=_port, metavar="P", help="a free port there")
    parser.add_argument("--sbatch", action="store_true", help="print a batch file for Slurm")
    parser.add_argument("--run", action="store_true", help="run the job, and do not print it")
    parser.add_argument(
        "--timeout", type=_seconds, metavar="S", help="with --run: stop the job after S seconds"
    )
    parser.add_argument("-m", dest="module", action="store_true", help="SCRIPT is a module's name")
    # One list for both: a separate SCRIPT would take a -- behind it away from ARGS.
    parser.add_argument(
        "command",
        metavar="SCRIPT [ARGS ...]",
        nargs=argparse.REMAINDER,
        help="what every rank runs; ARGS are handed on as they are",
    )


def add_where(parser: argparse.ArgumentParser) -> None:
    """Add --launcher, and -n, --hosts or --hostfile, to parser."""
    parser.add_argument(
        "--launcher",
        choices=LAUNCHERS,
        default="torchrun",
        metavar="NAME",
        help=f"{', '.join(LAUNCHERS[:-1])} or {LAUNCHERS[-1]} (default: %(default)s)",
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument("-n", type=_count, help="ranks on this machine (default: 2)")
    where.add_argument("--hosts", help="hosts and ranks on each, such as node-a:2,node-b:2")
    where.add_argument("--hostfile", metavar="FILE", help="the same, one `node-a slots=2` a line")


def hosts_of(args: argparse.Namespace) -> tuple[Host, ...]:
    """Return the hosts that the options of add_where give. Raises HostfileError."""
    hosts = local(args.n or 2)
    if args.hosts is not None:
        hosts = parse_hosts(args.hosts)
    elif args.hostfile is not None:
        hosts = read_hostfile(args.hostfile)
    if len(hosts) > 1 and any(_is_loopback(host) for host in hosts):
        raise HostfileError(
            "localhost is another machine on every host.\n"
            f"Write the name that the other hosts know this one by, such as {socket.gethostname()}."
        )
    return hosts


def main(args: argparse.Namespace) -> int:
    """Print or run the job that args describe; return 0, 1 (the job failed) or 2 (wrong use)."""
    return exit_status(lambda: _main(args))


def _main(args: argparse.Namespace) -> None:
    job = _job(args)
    if job.max_restarts and (args.sbatch or args.launcher in ("mpirun", "srun")):
        raise LauncherRefused(
            f"{'srun' if args.sbatch else args.launcher} starts no rank again: --max-restarts"
            " is for torchrun.\nStart the same command again; the script continues its work."
        )
    if args.sbatch:
        print(sbatch(job), end="")
    elif args.run:
        run(args.launcher, job, args.timeout, free_port=args.master_port is None)
    else:
        _print(job, plan(args.launcher, job))


def run(
    launcher: str,
    job: Job,
    timeout_s: float | None = None,
    free_port: bool = True,
    echo: bool = True,
) -> None:
    """Run job; free_port: with a port that is free on its first host, when it has several."""
    if free_port and len(job.hosts) > 1:
        job = replace(job, master_port=free_port_on(job.hosts[0].name, job.python))
    run_local(plan(launcher, job), timeout_s, echo)


def exit_status(work: Callable[[], None]) -> int:
    """Do work, which starts a job; print why it failed, and return the exit status."""
    try:
        work()
    except (JobFailed, HostUnreachable) as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("Interrupted: every process of the job has been stopped.", file=sys.stderr)
        return 130
    except (HostfileError, LauncherNotFound, LauncherRefused, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _job(args: argparse.Namespace) -> Job:
    """Return the job that args describe."""
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command or not (args.module or os.path.isfile(command[0])):
        raise FileNotFoundError(
            f"{command[0] if command else 'SCRIPT'} not found.\n"
            "Expected the path of a script, or -m and a module's name."
        )
    return Job(
        command[0],
        tuple(command[1:]),
        args.module,
        hosts_of(args),
        master_addr=args.master_addr,
        master_port=args.master_port or Job.master_port,
        rdzv=args.rdzv,
        max_restarts=args.max_restarts or 0,
        env=threads(os.environ),
    )


def _print(job: Job, commands: list[HostCommand]) -> None:
    for command in commands:
        print(f"{command.host}$ {command}" if len(job.hosts) > 1 else command)


def _is_loopback(host: Host) -> bool:
    return host.name in ("localhost", "127.0.0.1")


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}, expected a whole number, 1 or more")
    return int(text)


def _port(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 65536:
        raise argparse.ArgumentTypeError(f"{text!r}, expected a port, 1 to 65535")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}, expected a number of seconds above 0")
    return seconds
