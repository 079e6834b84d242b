"""Why did ssh not get in? Read from its messages, each with what to type.

    reason("ssh: connect to host 10.0.0.2 port 22: Connection refused", "node-b")

Lesson: notebooks/06_two_nodes.ipynb
"""

from __future__ import annotations

import os
import re
import shlex
from dataclasses import dataclass

from .ssh import CONNECT_TIMEOUT_S, typed
from .ssh_keys import find_key, locked_key, ssh_folder


@dataclass(frozen=True)
class Reason:
    """Which check ssh failed at, what was seen, and what to type."""

    check: str  # "reachable", "host key" or "login"
    seen: str
    fix: str
    known: bool = True  # False: ssh's own last line, and check is a guess


# (in ssh's messages, check, what was seen, what to type), the first that matches counts.
# {0}, {1} are the pattern's groups, as ssh wrote them; in the last column quoted for a shell.
_REASONS = (
    (
        r"Could not resolve hostname (\S+): (.*)",
        "reachable",
        "the name {0} has no address: {1}",
        "echo ADDRESS {0} | sudo tee -a /etc/hosts",
    ),
    (
        r"connect to host (\S+) port (\d+): Connection refused",
        "reachable",
        "refused: no sshd on port {1} of {0}",
        "on {host}: sudo systemctl start sshd",
    ),
    (
        r"connect to host (\S+) port (\d+): \w+ timed out",
        "reachable",
        f"timed out: port {{1}} of {{0}} gave no answer in {CONNECT_TIMEOUT_S} s, "
        "it is switched off or a firewall drops the packets",
        "ping -c 3 {0}",
    ),
    (
        r"timed out during banner exchange",
        "reachable",
        f"timed out: connected, but no sshd greeted in {CONNECT_TIMEOUT_S} s",
        "on {host}: sudo systemctl restart sshd",
    ),
    (r"connect to host (\S+) port (\d+): (.*)", "reachable", "{0} port {1}: {2}", "ping -c 3 {0}"),
    (
        r"Offending \S+ key in (.+):\d+\n(?s:.*)Host key for (\S+) has changed",
        "host key",
        "changed: {1} has another key than the one in {0}; was it set up anew?",
        "ssh-keygen -f {0} -R {1} && {accept}",
    ),
    (
        r"Host key verification failed",
        "host key",
        "not known on this machine yet; ssh shows it and asks",
        "{accept}",
    ),
    (
        r"Permissions (\d+) for '(.+)' are too open",
        "login",
        "ssh does not use the key {1}: its permissions are {0}, expected 0600",
        "chmod 600 {1}",
    ),
    (
        r"(\S+): Permission denied \((.*(?:password|keyboard-interactive).*)\)",
        "login",
        "permission denied: {0} does not accept a key of yours",
        "{copy_id}",
    ),
    (
        # Without a password ssh-copy-id gets in as little as ssh does.
        r"(\S+): Permission denied \((.*)\)",
        "login",
        "permission denied: {0} does not accept a key of yours, and takes no password ({1})",
        "on {host}, in ~/.ssh/authorized_keys: the line that `cat ~/.ssh/id_*.pub` prints here",
    ),
)


def reason(text: str, host: str, config: str | None = None) -> Reason:
    """Return why ssh to host failed, from its messages; its last line when they are not known."""
    if "Permission denied (" in text and (key := locked_key(host, config)):
        agent = "" if "SSH_AUTH_SOCK" in os.environ else 'eval "$(ssh-agent)" && '
        seen = f"permission denied: the key {key} has a passphrase, and no agent holds it"
        return Reason("login", seen, f"{agent}ssh-add {shlex.quote(str(key))}")
    commands = {
        "host": host,
        # Also where the configuration says yes: then ssh would refuse instead of asking.
        "accept": typed("ssh -o StrictHostKeyChecking=ask", host, config, "true"),
        "copy_id": _copy_id(host, config),
    }
    for pattern, check, seen, fix in _REASONS:
        if match := re.search(pattern, text):
            quoted = [shlex.quote(group) for group in match.groups()]
            return Reason(check, seen.format(*match.groups()), fix.format(*quoted, **commands))
    last = text.strip().rpartition("\n")[2].strip() or "ssh ended without a word"
    return Reason("login", last, typed("ssh -v", host, config, "true"), known=False)


def _copy_id(host: str, config: str | None) -> str:
    # ssh-copy-id gives up where there is no key. A configuration file may name one elsewhere.
    if config or find_key(ssh_folder()):
        return typed("ssh-copy-id", host, config)
    return f"python -m ddp_helpers ssh keys --run {host}"
