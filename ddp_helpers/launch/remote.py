"""A job's command on another host, over ssh, in the caller's folder, ended when the caller ends it.

    over_ssh(command, mark, log_dir)     # a HostCommand for this machine that runs it there

ssh hands on neither variables nor signals. The variables go into the command line; the end of ssh's
stdin tells the far side to stop, also when this machine has gone.
Source: ssh(1). Lesson: notebooks/06_two_nodes.ipynb
"""

from __future__ import annotations

import functools
import re
import shlex
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import replace

from .child_environ import MARK
from .commands import HostCommand
from .ssh import in_this_folder, ssh_command

# Runs on the far side, in whatever sh it has. Background commands lose stdin, so 3 keeps it.
_ON_THE_HOST = """\
mark=$1 log_dir=$2; shift 2
end_rest() {
  for file in $(grep -ls "$mark" /proc/[0-9]*/environ); do
    pid=${file#/proc/}; kill -KILL "${pid%/environ}" 2>/dev/null
  done
}
exec 3<&0
"$@" </dev/null 3<&- &
job=$!
{
  cat <&3 >/dev/null; kill -TERM $job
  for _ in 1 2 3 4 5 6 7 8; do sleep 0.5; kill -0 $job || exit; sleep 0.5; done
  kill -KILL $job; end_rest
} >/dev/null 2>&1 &
guard=$!
wait $job; status=$?
kill $guard 2>/dev/null
end_rest
rm -rf -- "$log_dir"
exit $status
"""
# The user's settings for this mpirun. Its ranks get what -x and -genv name.
_MPI_SETTINGS = re.compile(r"(OMPI|PRTE)_(MCA|ALLOW)_.*|I_MPI_.*|HYDRA_.*")


class HostUnreachable(RuntimeError):
    """A host does not answer over ssh; the text says what to try."""


def over_ssh(
    command: HostCommand, mark: str, log_dir: str, environ: Mapping[str, str]
) -> HostCommand:
    """Return the command for this machine that runs command on its host.

    environ is what a command on this machine would inherit: of it go the settings of mpirun, and
    what run_local adds for every launcher. mark is in the environment of the job's processes.
    """
    variables = {
        name: value
        for name, value in environ.items()
        if name in (MARK, "OMP_NUM_THREADS", "PET_TEE", "PET_LOG_DIR")
        or (command.mpi and _MPI_SETTINGS.fullmatch(name))
    }
    variables.update(command.env)
    assignments = [f"{name}={value}" for name, value in variables.items()]
    there = ["sh", "-c", _ON_THE_HOST, "sh", mark, log_dir, "env", *assignments, *command.argv]
    return replace(command, argv=(*ssh_command(command.host), in_this_folder(there)), env=())


def free_port_on(host: str, python: str) -> int:
    """Return a port that is free now on host, asked over ssh unless it is this machine.

    Raises HostUnreachable.
    """
    code = "import socket; print(socket.create_server(('', 0)).getsockname()[1])"
    argv = (python, "-c", code)
    if not is_this_machine(host):
        argv = (*ssh_command(host), shlex.join(argv))
    try:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise HostUnreachable(f"{host}: {error}") from None
    if done.returncode or not done.stdout.strip().isdecimal():
        said = done.stderr.strip().splitlines() or ["it printed no port"]
        raise HostUnreachable(
            f"{host} could not be asked for a free port: {said[-1]}\n"
            f"Try: ssh {host} {shlex.quote(python)} --version"
        )
    return int(done.stdout)


@functools.cache  # a name that is not known here may take the name server seconds, each time
def is_this_machine(host: str) -> bool:
    """Return True when host names this machine: an address of its own, or nothing else."""
    if host in ("localhost", socket.gethostname()):
        return True
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True
