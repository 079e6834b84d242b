"""Run the commands of a job, here or over ssh, to the end, and leave no process behind.

    output = run_local(torchrun(Job("train.py", hosts=local(2))), timeout_s=600)
    results = launch_here("mpirun", "ddp_helpers.scripts.message_passing", n=4)

Lesson: notebooks/05_three_launchers.ipynb, notebooks/08_when_it_hangs.ipynb
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..results import read_results
from .commands import HostCommand, Job, plan, threads
from .failures import Failure, first_failure
from .hosts import local
from .mpi import LauncherNotFound, check_root
from .output import Line
from .processes import signals_end_the_block, started, watch
from .remote import is_this_machine
from .ssh import check_installed


class JobFailed(RuntimeError):
    """A job failed, or did not end in time. None of its processes is left."""

    def __init__(self, message: str, command: HostCommand, failure: Failure, output: str):
        where = "" if is_this_machine(command.host) else f" on {command.host}"
        text = f"{message}\n{failure.text}".rstrip()
        super().__init__(f"{text}\nThe command{where} was: {command}")
        self.command = command
        self.rank = failure.rank  # None: not known
        self.exit_code = failure.exit_code  # negative: a signal's number; None: still running
        self.traceback = failure.text  # of the first rank that failed, else the last lines
        self.output = output


def run_local(
    commands: Sequence[HostCommand],
    timeout_s: float | None = 600.0,
    echo: bool = True,
    environ: Mapping[str, str] = os.environ,
) -> str:
    """Run commands together, each on its host; return what they printed, stdout and stderr.

    Those for another host go there over ssh, to the same folder. echo shows each whole line as
    it comes. The commands inherit environ without the variables of a job around this process;
    over ssh only mpirun's settings travel. All are stopped when one fails, after timeout_s
    seconds (None: no limit), after Ctrl-C, and when SIGTERM or SIGHUP ends this process.

    Raises JobFailed; and LauncherNotFound or LauncherRefused before anything is started.
    """
    _check_can_start(commands, environ)
    lines: list[Line] = []

    def take(line: Line) -> None:
        lines.append(line)
        if echo:
            print(line.text, flush=True)

    with signals_end_the_block(), tempfile.TemporaryDirectory(prefix="ddp_helpers_") as log_dir:
        deadline = time.monotonic() + (float("inf") if timeout_s is None else timeout_s)
        with started(commands, environ, log_dir, take) as (processes, pipes):
            codes = watch(processes, pipes, deadline, take)
            in_time = len(lines)  # what follows is how the others take being stopped
    output = "".join(f"{line.text}\n" for line in lines)
    if any(codes):
        raise _failed(commands, codes, first_failure(lines), output)
    if None in codes:
        failure = first_failure(lines[:in_time])
        message = f"The job did not end within {timeout_s:g} s and was stopped."
        if failure.rank is not None:  # MPICH leaves the other ranks waiting
            message += f" Rank {failure.rank} had failed:"
        raise JobFailed(message, commands[codes.index(None)], failure, output)
    return output


def launch_here(
    launcher: str,
    target: str,
    *args: str,
    n: int = 2,
    module: bool = True,
    timeout_s: float | None = 120.0,
    result_dir: str | Path | None = None,
    echo: bool = False,
) -> list[dict[str, Any]]:
    """Run target with n ranks on this machine under launcher; return each rank's result, in order.

    target must take --result_dir and write a result for every rank there: result_dir, or a
    temporary folder. Raises JobFailed.
    """
    with contextlib.ExitStack() as stack:
        if result_dir is None:
            result_dir = stack.enter_context(tempfile.TemporaryDirectory(prefix="ddp_helpers_"))
        args = (*args, "--result_dir", str(result_dir))
        job = Job(target, args, module, local(n), env=threads(os.environ))
        run_local(plan(launcher, job), timeout_s, echo)
        return read_results(result_dir)


def _check_can_start(commands: Sequence[HostCommand], environ: Mapping[str, str]) -> None:
    for command in commands:
        if command.mpi:
            check_root(command.mpi, environ)
        program = command.argv[0]
        if not is_this_machine(command.host):
            check_installed()  # ssh takes it there
        elif not shutil.which(program):
            hint = "\nsrun comes with Slurm: use it on a cluster, or another launcher here."
            raise LauncherNotFound(
                f"{program} not found on this machine.{hint if program == 'srun' else ''}"
            )


def _failed(commands, codes, failure: Failure, output: str) -> JobFailed:
    number = next(number for number, code in enumerate(codes) if code)
    command = commands[number if failure.command is None else failure.command]
    code = codes[number] if failure.exit_code is None else failure.exit_code
    who = "The job" if failure.rank is None else f"Rank {failure.rank}"
    how = f"failed with exit code {code}"
    if code < 0:
        how = f"was ended by signal {-code} ({signal.strsignal(-code)})"
    return JobFailed(f"{who} {how}.", command, replace(failure, exit_code=code), output)
