"""What a host says of itself and of an interpreter over there, asked through one ssh.

    ask("node-a")     # Answer(values={'user': 'me', 'torch': '2.14.1', ...}, skew_s=0.01, ...)

The host needs sh and nothing else. Nothing is written there.
Lesson: notebooks/06_two_nodes.ipynb
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import inspect
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field

from .ssh import ssh_command

DEADLINE_S = 8.0  # for everything that is asked of one host


def versions() -> dict[str, str]:
    """Return the installed versions of torch and ddp_helpers, "" for one that is not installed."""
    found = {}
    for name in ("torch", "ddp_helpers"):
        try:
            found[name] = importlib.metadata.version(name.replace("_", "-"))
        except importlib.metadata.PackageNotFoundError:
            found[name] = ""
    return found


@dataclass(frozen=True)
class Answer:
    """What one host said, as far as ssh got within the deadline."""

    host: str
    values: dict[str, str] = field(default_factory=dict)  # user, python, torch, ddp_helpers
    skew_s: float | None = None  # the host's clock minus this one's; None: not measured
    skew_error_s: float = 0.0  # skew_s is right to within this
    text: str = ""  # ssh's messages, and the remote programs'
    in_time: bool = True


def ask(
    host: str,
    config: str | None = None,
    python: str = sys.executable,
    deadline_s: float = DEADLINE_S,
) -> Answer:
    """Return what host says of itself, and of the interpreter at the path python over there."""
    command = [*ssh_command(host, config, options=["LogLevel=ERROR"]), "sh -s"]
    # A file: a proxy that ssh has started would hold a pipe open after ssh itself was killed.
    with (
        tempfile.TemporaryFile("w+", errors="replace") as messages,
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=messages,
            text=True,
            errors="replace",
        ) as process,
    ):
        # ssh's own timeout counts anew for a name's second address: this one is for everything.
        timer = threading.Timer(deadline_s, process.kill)
        timer.start()
        try:
            values, skew, other = _talk(process, python)
            in_time = process.wait() != -signal.SIGKILL
        finally:
            timer.cancel()
            process.kill()
        messages.seek(0)
        return Answer(host, values, *skew, messages.read().strip() or other.strip(), in_time)


def _talk(process: subprocess.Popen, python: str):
    """Return (values, (skew_s, skew_error_s), all other lines) of the shell behind process."""
    values: dict[str, str] = {}
    skew: tuple[float | None, float] = (None, 0.0)
    other = []
    asked = 0.0
    _write(process, _script(python))
    for line in process.stdout:
        match = _VALUE.search(line)
        if not match:
            other.append(line)
            continue
        values[match[1]] = match[2]
        if match[1] == "user":  # logged in: from here on a line takes one round trip
            asked = time.time()
            _write(process, "go\n")
        elif match[1] == "clock":
            skew = _skew(asked, match[2], time.time())
    return values, skew, "".join(other)


_VALUE = re.compile(r"ddp_helpers:(\w+)=(.*)")


def _script(python: str) -> str:
    """Return what sh runs on the host. In braces, so that read finds no line of the script."""
    code = (
        "from __future__ import annotations\nimport importlib.metadata\n\n"
        f"{inspect.getsource(versions)}\n"
        "for name, version in {'python': 'runs', **versions()}.items():\n"
        "    print(f'ddp_helpers:{name}={version}')\n"
    )
    path = shlex.quote(python)
    return (
        "{\n"
        'echo "ddp_helpers:user=$(id -un)"\n'
        "read -r go\n"
        'echo "ddp_helpers:clock=$(date +%s.%N)"\n'
        f"if [ -f {path} ] && [ -x {path} ]; then {path} -c {shlex.quote(code)} </dev/null\n"
        "else echo ddp_helpers:python=missing; fi\n"
        "exit\n}\n"
    )


def _skew(asked: float, clock: str, told: float) -> tuple[float | None, float]:
    """Return (skew, error) of a clock that was read between asked and told, all in seconds."""
    seconds, _, fraction = clock.partition(".")
    if not seconds.isdecimal():
        return None, 0.0
    error = (told - asked) / 2
    if fraction.isdecimal():
        return float(clock) - (asked + told) / 2, error
    # Only GNU's date knows %N. Without it the clock is anywhere within the second.
    return int(seconds) + 0.5 - (asked + told) / 2, error + 0.5


def _write(process: subprocess.Popen, text: str) -> None:
    # Past the file object: what it could not write it would try again, and fail, when closed.
    with contextlib.suppress(BrokenPipeError):  # ssh has ended, and says why in its messages
        os.write(process.stdin.fileno(), text.encode())
