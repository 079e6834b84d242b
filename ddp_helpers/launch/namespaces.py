"""Nodes made of Linux namespaces, each with an sshd of its own: practice_cluster.py as root.

    this machine ── bridge 10.77.K.254 ──┬── eth0 10.77.K.1 node1: host name, hosts file,
                                         └── eth0 10.77.K.2 node2  processes, /run, /dev/shm, sshd

Files are shared, as on a cluster with a common file system; /run and /dev/shm are a node's own,
and so is TMPDIR. Keys, known_hosts and configuration lie in the cluster's private folder and are
mounted over /etc/hosts and /etc/ssh/ssh_config inside the nodes only.
Source: namespaces(7), ip-link(8), tc-tbf(8), sshd_config(5). Lesson: notebooks/06_two_nodes.ipynb
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from .cluster import Cluster, ClusterError, Node

_MARK = "DDP_HELPERS_NODE"  # in the environment of the process that holds a node: folder/name
_PACKAGES = {
    "ip": "iproute2",
    "tc": "iproute2",
    "nsenter": "util-linux",
    "setsid": "util-linux",
    "unshare": "util-linux",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    "sshd": "openssh-server",
}
_RATE = re.compile(r"([1-9][0-9]*)(k|m|g)bit")
_DEADLINE_S = 10.0
# Of each node alone: mpirun names folders there after the host and the process, and of two nodes
# or clusters that share them one would remove the other's.
_TMPDIR = "/run/tmp"

# The first process of a node. It ends as sshd: when it is killed, the node is gone.
_FIRST_PROCESS = """\
set -eu
folder=$1 name=$2 address=$3 sshd=$4
read -r pid _ </proc/self/stat  # still the machine's /proc, which knows our number outside
echo "$name" >/proc/sys/kernel/hostname
mount -t proc proc /proc
mount -t tmpfs tmpfs /dev/shm
mount -t tmpfs tmpfs /run
mkdir -p /run/sshd /run/lock /run/tmp
chmod 1777 /run/tmp
mount --bind "$folder/$name.hosts" /etc/hosts
mount --bind "$folder/ssh_config" /etc/ssh/ssh_config
[ ! -f /etc/nsswitch.conf ] || mount --bind "$folder/nsswitch.conf" /etc/nsswitch.conf
echo "$pid" >"$folder/$name.pid.new"
mv "$folder/$name.pid.new" "$folder/$name.pid"
until ip link set eth0 up 2>/dev/null; do
  [ -f "$folder/cluster.json" ] || exit 1  # removed by a down, after an up that was killed
  sleep 0.01
done
ip link set lo up
ip address add "$address/24" dev eth0
exec "$sshd" -D -f "$folder/sshd_config" -o "ListenAddress=$address"
"""


def check(rate: str | None) -> None:
    """Raise ClusterError when a program is missing, or rate is none that tc knows."""
    for program, package in _PACKAGES.items():
        if not _which(program):
            raise ClusterError(f"{program} not found.\nInstall it: apt-get install {package}")
    if rate is not None and not _RATE.fullmatch(rate):
        raise ClusterError(f"rate {rate!r}, expected a number with kbit, mbit or gbit: 200mbit")
    tried = _run([_which("unshare"), "--net", "--mount", "--uts", "--ipc", "true"], check=False)
    if tried.returncode:
        raise ClusterError(
            f"This machine does not let root make namespaces: {tried.stderr.strip()}\n"
            "In a container: start it with --privileged, or use: cluster up --loopback"
        )


def make(cluster: Cluster, number: int) -> Cluster:
    """Make number nodes, and return the cluster with them when every sshd answers."""
    cluster = _with_bridge(cluster, number)
    _write_configuration(cluster)
    for node in cluster.nodes:
        _start(cluster.folder, node)
    deadline = time.monotonic() + _DEADLINE_S
    for node, link in zip(cluster.nodes, _links(cluster)[1:], strict=True):
        _wait(cluster.folder, node, deadline, lambda node: _first_pid(cluster.folder, node.name))
        _connect(cluster, node, link)
    for node in cluster.nodes:
        _wait(cluster.folder, node, deadline, _answers)
    return cluster


def is_up(cluster: Cluster) -> bool:
    """Return True when the first process of every node is running."""
    return all(_first_pid(cluster.folder, node.name) for node in cluster.nodes)


def remove(cluster: Cluster) -> None:
    """End every process on the nodes, and remove the nodes and the bridge."""
    first = [_first_pid(cluster.folder, node.name) for node in cluster.nodes]
    deadline = time.monotonic() + _DEADLINE_S
    # With the process that holds it ends a node's first process, and with that all others.
    while (holders := _marked(cluster.folder)) or any(_pid_space(pid) for pid in first if pid):
        for pid in holders:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            raise ClusterError(f"processes {holders} of cluster {cluster.name} do not end.")
        time.sleep(0.01)
    # The interfaces follow by themselves, but later. Each deletion takes the kernel half a second.
    deleting = [
        subprocess.Popen([_which("ip"), "link", "delete", link], stderr=subprocess.DEVNULL)
        for link in _links(cluster)
        if _owner(link) in ("", str(cluster.folder))  # "": up was killed before it could say
    ]
    for process in deleting:
        process.wait(timeout=_DEADLINE_S)
    if left := [link for link in _links(cluster) if _owner(link) == str(cluster.folder)]:
        raise ClusterError(f"interfaces {', '.join(left)} do not go away: try cluster down again.")


def command(cluster: Cluster, node: Node, argv: Sequence[str]) -> tuple[str, ...]:
    """Return the command that runs argv on node, in the caller's folder and environment."""
    pid = _first_pid(cluster.folder, node.name)
    if not pid:
        raise ClusterError(f"{node.name} has ended.\nMake the cluster again: cluster down, then up")
    # Entering another mount namespace leaves the folder: env goes back to it.
    enter = (_which("nsenter"), "--target", str(pid), "--all", "--", "env", "-C", os.getcwd())
    tmpdir = () if "TMPDIR" in os.environ else (f"TMPDIR={_TMPDIR}",)
    return (*enter, *tmpdir, *argv)


def processes(cluster: Cluster) -> dict[str, list[tuple[int, str]]]:
    """Return for each node the (process number on this machine, command line) of what runs."""
    found = {node.name: [] for node in cluster.nodes}
    first = {_first_pid(cluster.folder, name): name for name in found}
    spaces = {_pid_space(pid): name for pid, name in first.items()}
    for pid in _all_pids():
        with contextlib.suppress(OSError):  # ended meanwhile
            name = spaces.get(_pid_space(pid))
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if name and pid not in first:
                found[name].append((pid, " ".join(word.decode() for word in words).strip()))
    return found


def _with_bridge(cluster: Cluster, number: int) -> Cluster:
    """Make the bridge in the first network that nobody uses, and name the nodes' addresses."""
    names = [f"node{n}" for n in range(1, number + 1)]
    for network in _free_networks():
        nodes = tuple(Node(name, str(network[n]), name) for n, name in enumerate(names, 1))
        planned = replace(cluster, nodes=nodes)
        bridge, *links = _links(planned)
        if any(Path("/sys/class/net", link).exists() for link in (bridge, *links)):
            continue
        planned.write()
        # The name is taken by making it: of two clusters that start together one goes on.
        ip = _which("ip")
        add = [ip, "link", "add", bridge, "type", "bridge"]
        if _run(add, check=False).returncode:
            continue
        _run([ip, "address", "add", f"{network[254]}/24", "dev", bridge])
        _run([ip, "link", "set", bridge, "alias", str(cluster.folder), "up"])
        return planned
    raise ClusterError("no free network of 10.77.0.0/16: every /24 of it is in use here.")


def _free_networks() -> Iterator[ipaddress.IPv4Network]:
    """Yield the /24 networks of 10.77.0.0/16 that this machine has no route or address in."""
    used = []
    for what in ("route", "address"):
        for row in json.loads(_run([_which("ip"), "-json", "-4", what, "show"]).stdout or "[]"):
            used += [row["dst"]] if row.get("dst", "default") != "default" else []
            used += [f"{a['local']}/{a['prefixlen']}" for a in row.get("addr_info", [])]
    taken = [ipaddress.ip_network(text, strict=False) for text in used]
    for network in ipaddress.ip_network("10.77.0.0/16").subnets(new_prefix=24):
        if not any(network.overlaps(other) for other in taken):
            yield network


def _links(cluster: Cluster) -> list[str]:
    """Return the names of the cluster's interfaces on this machine, the bridge first."""
    third = cluster.nodes[0].address.split(".")[2]
    bridge = f"practice{third}"
    return [bridge, *(f"{bridge}n{number}" for number in range(1, len(cluster.nodes) + 1))]


def _owner(link: str) -> str | None:
    """Return the folder of the cluster that an interface belongs to, None when it is not there."""
    with contextlib.suppress(OSError):
        return Path("/sys/class/net", link, "ifalias").read_text().strip()
    return None


def _write_configuration(cluster: Cluster) -> None:
    folder, nodes = cluster.folder, cluster.nodes
    for key in ("host_key", "id_ed25519"):
        _run([_which("ssh-keygen"), "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)])
    host_key = (folder / "host_key.pub").read_text().rsplit(" ", 1)[0]  # without its comment
    known = "".join(f"{node.name},{node.address} {host_key}\n" for node in nodes)
    (folder / "known_hosts").write_text(known)
    (folder / "authorized_keys").write_text((folder / "id_ed25519.pub").read_text())
    bridge = str(ipaddress.ip_network(f"{nodes[0].address}/24", strict=False)[254])
    own = f"127.0.0.1 localhost\n::1 localhost\n{bridge} {socket.gethostname()}\n"
    own += "".join(f"{node.address} {node.name}\n" for node in nodes)
    for node in nodes:
        (folder / f"{node.name}.hosts").write_text(own)
    # A node reaches no name server. torch looks up every address that connects, and would wait.
    with contextlib.suppress(FileNotFoundError):
        lookup = Path("/etc/nsswitch.conf").read_text()
        lookup = re.sub(r"^hosts:.*$", "hosts: files", lookup, flags=re.MULTILINE)
        (folder / "nsswitch.conf").write_text(lookup)
    (folder / "sshd_config").write_text(
        f"HostKey {folder}/host_key\nAuthorizedKeysFile {folder}/authorized_keys\n"
        "PasswordAuthentication no\nKbdInteractiveAuthentication no\nUsePAM no\n"
        "StrictModes no\nPidFile none\nPrintMotd no\n"  # StrictModes: /tmp is open to all
        f"SetEnv TMPDIR={_TMPDIR}\n"
        "MaxStartups 100:30:200\n"
    )
    # Used as /etc/ssh/ssh_config on the nodes, and with `ssh -F` on this machine.
    (folder / "ssh_config").write_text(
        "".join(f"Host {node.name}\n  HostName {node.address}\n" for node in nodes)
        + f"Host *\n  IdentityFile {folder}/id_ed25519\n  IdentitiesOnly yes\n"
        f"  UserKnownHostsFile {folder}/known_hosts\n  StrictHostKeyChecking yes\n"
        "  BatchMode yes\n  ConnectTimeout 5\n"
    )
    cluster.write_ssh(f'exec {_which("ssh")} -F {shlex.quote(str(folder))}/ssh_config "$@"\n')


def _start(folder: Path, node: Node) -> None:
    """Start the first process of node, which waits for its network interface."""
    spaces = ["--net", "--uts", "--mount", "--ipc", "--pid", "--fork", "--kill-child"]
    script = ["sh", "-c", _FIRST_PROCESS, "sh", str(folder), node.name, node.address]
    with open(folder / f"{node.name}.log", "wb") as log:
        # setsid --fork: a node does not end with the process or the terminal that made it.
        subprocess.run(
            [_which("setsid"), "--fork", _which("unshare"), *spaces, *script, _which("sshd")],
            env={"PATH": _path(), _MARK: f"{folder}/{node.name}"},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            check=True,
        )


def _connect(cluster: Cluster, node: Node, link: str) -> None:
    """Give node its eth0, the other end of a cable into the bridge, limited on both ends."""
    pid, ip = str(_first_pid(cluster.folder, node.name)), _which("ip")
    cable = [ip, "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", pid]
    _run(cable)
    if cluster.rate:
        number, unit = _RATE.fullmatch(cluster.rate).groups()
        bits = int(number) * {"k": 10**3, "m": 10**6, "g": 10**9}[unit]
        burst = max(bits // 8 // 100, 32 * 1024)  # bytes in 10 ms: the kernel's clock ticks in 4
        limit = ["root", "tbf", "rate", cluster.rate, "burst", str(burst), "latency", "50ms"]
        inside = [_which("nsenter"), "--target", pid, "--net", "--"]
        _run([*inside, _which("tc"), "qdisc", "add", "dev", "eth0", *limit])
        _run([_which("tc"), "qdisc", "add", "dev", link, *limit])
    alias = ["alias", str(cluster.folder)]  # says whose it is, to whoever lists the interfaces
    _run([ip, "link", "set", link, "master", _links(cluster)[0], *alias, "up"])


def _wait(folder: Path, node: Node, deadline: float, condition: Callable[[Node], object]) -> None:
    """Wait for condition; raise ClusterError when node has ended, or at the deadline."""
    while not condition(node):
        if not _marked(folder / node.name) or time.monotonic() > deadline:
            said = (folder / f"{node.name}.log").read_text().strip()
            raise ClusterError(f"{node.name} did not start: {said or 'no answer in 10 s'}")
        time.sleep(0.005)


def _answers(node: Node) -> bool:
    """Return True when an sshd greets at node's address."""
    try:
        with socket.create_connection((node.address, 22), timeout=1) as connection:
            return connection.recv(4) == b"SSH-"
    except OSError:
        return False


def _first_pid(folder: Path, node: str) -> int | None:
    """Return the process number of node's first process, None when it is not running."""
    with contextlib.suppress(OSError, ValueError):
        pid = int((folder / f"{node}.pid").read_text())
        status = Path(f"/proc/{pid}/status").read_text()
        parent = re.search(r"^PPid:\s+(\d+)$", status, re.MULTILINE)
        # Its own environment is no proof: sshd overwrites it with its title.
        return pid if _is_marked(int(parent[1]), folder / node) else None
    return None


def _pid_space(pid: int) -> str | None:
    """Return the namespace of a process's number, None when the process has ended."""
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/{pid}/ns/pid")
    return None


def _all_pids() -> list[int]:
    return sorted(int(directory.name) for directory in Path("/proc").glob("[0-9]*"))


def _marked(path: Path) -> list[int]:
    """Return the processes that hold a node, or all nodes of a folder."""
    return [pid for pid in _all_pids() if _is_marked(pid, path)]


def _is_marked(pid: int, path: Path) -> bool:
    try:
        environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # ended meanwhile
        return False
    marks = [line.decode() for line in environ if line.startswith(_MARK.encode())]
    return any(f"{mark}/".startswith(f"{_MARK}={path}/") for mark in marks)


def _path() -> str:
    # An administrator's programs are often not on PATH, and sshd insists on an absolute path.
    return f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"


def _which(program: str) -> str | None:
    return shutil.which(program, path=_path())


def _run(argv: list[str], check: bool = True) -> subprocess.CompletedProcess:
    done = subprocess.run(
        argv,
        close_fds=False,  # it holds the lock of the clusters: down waits for what a killed up began
        capture_output=True,
        text=True,
        timeout=_DEADLINE_S,
        check=False,
    )
    if check and done.returncode:
        raise ClusterError(f"{' '.join(argv)}: {done.stderr.strip()}")
    return done
