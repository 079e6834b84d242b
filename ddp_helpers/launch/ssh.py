"""One ssh to a host that asks no question and starts in bounded time.

    ssh_command("node-a")      # ['ssh', '-T', '-o', 'BatchMode=yes', ..., '--', 'node-a']

OpenSSH's own program does the work, with the user's own configuration.
Lesson: notebooks/06_two_nodes.ipynb
"""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Sequence

from .mpi import LauncherNotFound

CONNECT_TIMEOUT_S = 5  # until the host has greeted


def ssh_command(host: str, config: str | None = None, options: Sequence[str] = ()) -> list[str]:
    """Return the words that start ssh to host; append the remote command, one shell text.

    config is a configuration file, in place of the user's and the system's (ssh -F). options
    are ssh's own, such as "LogLevel=ERROR". With nothing appended a login shell is started.
    """
    settings = (
        "BatchMode=yes",  # fail where ssh would ask for a password or about a host key
        f"ConnectTimeout={CONNECT_TIMEOUT_S}",
        "ServerAliveInterval=15",  # a host that lost its power is noticed within a minute
        "ControlPath=none",  # a shared connection stays in the background, our output in its hands
        "UpdateHostKeys=no",  # known_hosts is the user's
        *options,
    )
    file = ["-F", config] if config else []
    flags = [word for setting in settings for word in ("-o", setting)]
    return ["ssh", *file, "-T", *flags, "--", host]


def in_this_folder(argv: Sequence[str]) -> str:
    """Return the remote command that runs argv in the folder this process is in."""
    return f"cd {shlex.quote(os.getcwd())} && exec {shlex.join(argv)}"


def check_installed() -> None:
    """Raise LauncherNotFound when there is no ssh on this machine."""
    if not shutil.which("ssh"):
        raise LauncherNotFound(
            "ssh not found on this machine.\nInstall it with: apt-get install openssh-client"
        )


def typed(program: str, host: str, config: str | None = None, *remote: str) -> str:
    """Return text for a shell: program (ssh, ssh-copy-id), config if any, host, remote command."""
    file = ["-F", config] if config else []
    text = shlex.join(remote)  # read by the shell over there, and before that by the one here
    if text != " ".join(remote):
        text = shlex.quote(text)
    return " ".join([program, shlex.join([*file, host]), text]).rstrip()
