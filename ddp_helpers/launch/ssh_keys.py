"""The user's ssh key: found, or made once where there is none; and the command that hands it out.

Lesson: notebooks/06_two_nodes.ipynb
"""

from __future__ import annotations

import os
import pwd
import re
import shlex
import subprocess
from pathlib import Path

# What ssh offers by itself, in its order.
_IDENTITIES = ("id_rsa", "id_ecdsa", "id_ecdsa_sk", "id_ed25519", "id_ed25519_sk", "id_dsa")


class KeyNotMade(RuntimeError):
    """ssh-keygen made no key; the text says why."""


def ssh_folder() -> Path:
    """Return the folder where ssh keeps the user's keys."""
    return Path(pwd.getpwuid(os.getuid()).pw_dir) / ".ssh"  # as ssh does, whatever HOME says


def find_key(folder: Path) -> Path | None:
    """Return the first of ssh's default keys in folder; one half of a pair is enough."""
    for name in _IDENTITIES:
        # lexists: a link that leads nowhere today is still the user's.
        if any(os.path.lexists(folder / f"{name}{end}") for end in ("", ".pub")):
            return folder / name
    return None


def ensure_key(folder: Path) -> tuple[Path, bool]:
    """Return (the user's key in folder, whether it was made now); make one only if there is none.

    Nothing that exists is changed, permissions neither. The key has no passphrase: a launcher
    could not type it. Raises KeyNotMade.
    """
    if found := find_key(folder):
        return found, False
    key = folder / "id_ed25519"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        done = subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)],
            stdin=subprocess.DEVNULL,  # were the file there by now, "Overwrite?" would get no yes
            capture_output=True,
            text=True,
            errors="replace",
            timeout=10,
            check=False,
        )
    except OSError as error:
        raise KeyNotMade(f"{error.filename}: {error.strerror}, so no key was made.") from None
    if done.returncode:
        last = (done.stderr or done.stdout).strip().rpartition("\n")[2]
        raise KeyNotMade(f"ssh-keygen made no key {key}: {last}")
    return key, True


def locked_key(host: str, config: str | None = None) -> Path | None:
    """Return a key that ssh has for host and cannot use: with a passphrase, and in no agent."""
    file = ["-F", config] if config else []
    settings = _output(["ssh", *file, "-G", "--", host])
    held = _output(["ssh-add", "-L"])
    for name in re.findall(r"^identityfile (.+)$", settings, re.M):
        key, public = Path(name).expanduser(), Path(f"{name}.pub").expanduser()
        if not key.is_file() or not public.is_file():
            continue
        if set(public.read_text(errors="replace").split()[1:2]) & set(held.split()):
            continue
        # -y opens the key, here with an empty passphrase.
        if "passphrase" in _output(["ssh-keygen", "-y", "-P", "", "-f", str(key)]):
            return key
    return None


def _output(command: list[str]) -> str:
    """Return what command prints; "" when it is not there, or does not answer in 2 s."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=2,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout


def copy_command(key: Path, host: str, config: str | None = None) -> list[str]:
    """Return the command that lets this user into host with key; it asks for the password."""
    file = ["-F", config] if config else []
    return ["ssh-copy-id", "-i", f"{key}.pub", *file, host]


def copy(command: list[str]) -> bool:
    """Run a copy_command on the user's terminal; return whether the host has the key now."""
    print(f"$ {shlex.join(command)}", flush=True)
    return subprocess.run(command, check=False).returncode == 0
