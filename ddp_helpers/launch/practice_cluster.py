"""Two real nodes on one machine, for practice: started, found again, used and removed.

    with practice_cluster(nodes=2) as cluster:
        subprocess.run(on_node(cluster, "node1", ["ssh", "node2", "hostname"]))

With root on Linux each node is a set of namespaces (namespaces.py): its own network interface,
host name, hosts file, process numbers and sshd. Without, the nodes are loopback addresses and a
stand-in for ssh (loopback_nodes.py). Everything of a cluster lies in one private folder.
Lesson: notebooks/06_two_nodes.ipynb
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from . import loopback_nodes, namespaces
from .cluster import Cluster, ClusterError, read_cluster
from .guard import guarded

_KINDS = {"namespaces": namespaces, "loopback": loopback_nodes}
_READY = "ready"  # a file made last
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,30}")


def up(
    name: str = "practice", nodes: int = 2, rate: str | None = None, loopback: bool = False
) -> Cluster:
    """Make the cluster, or return the one that is up, and wait until every sshd answers.

    loopback: make loopback nodes even where namespaces are allowed. Raises ClusterError.
    """
    if not _NAME.fullmatch(name):
        raise ClusterError(f"cluster name {name!r}: use a-z, 0-9 and -, up to 31 characters.")
    if not 2 <= nodes <= 16:
        raise ClusterError(f"{nodes} nodes, expected 2 to 16.")
    kind = "loopback" if loopback else _best_kind()
    _KINDS[kind].check(rate)
    with _folders_locked() as parent:
        folder = parent / name
        if found := _find(folder):
            return _same(found, kind, nodes, rate)
        _remove(folder)  # half-made, or from before this machine was restarted
        folder.mkdir(mode=0o700)
        try:
            made = _KINDS[kind].make(Cluster(name, folder, kind, (), rate), nodes)
            (folder / _READY).touch()
            return made
        except BaseException:
            _remove(folder)
            raise


def find(name: str = "practice") -> Cluster:
    """Return the cluster of this user that is up under name. Raises ClusterError without one."""
    if found := _find(_parent() / name):
        return found
    flag = "" if name == "practice" else f" --name {name}"
    raise ClusterError(f"no cluster {name} is up.\nMake it: python -m ddp_helpers cluster up{flag}")


def names() -> list[str]:
    """Return the names of this user's clusters, also of half-made ones."""
    return sorted(note.parent.name for note in _parent().glob("*/cluster.json"))


def on_node(cluster: Cluster, node: str, argv: Sequence[str]) -> tuple[str, ...]:
    """Return the command that runs argv on node, in the caller's folder and environment."""
    return _KINDS[cluster.kind].command(cluster, cluster.node(node), argv)


def processes(cluster: Cluster) -> dict[str, list[tuple[int, str]]]:
    """Return for each node the (process number on this machine, command line) of what runs."""
    return _KINDS[cluster.kind].processes(cluster)


def down(name: str = "practice") -> bool:
    """Remove the cluster, half-made or whole, with everything that runs on it.

    Returns False when there was none. Raises ClusterError when something does not go away.
    """
    if not _parent().exists():
        return False
    with _folders_locked() as parent:
        return _remove(parent / name)


@contextlib.contextmanager
def practice_cluster(
    name: str | None = None, nodes: int = 2, rate: str | None = None, loopback: bool = False
) -> Iterator[Cluster]:
    """Yield a cluster and remove it at the end of the block, or when this process is killed."""
    name = name or f"block-{os.getpid()}"
    with guarded(__name__, name):
        try:
            yield up(name, nodes, rate, loopback)
        finally:
            down(name)


def _best_kind() -> str:
    """Return "namespaces" where this process may make them."""
    if sys.platform != "linux":
        raise ClusterError(
            "A practice cluster needs Linux.\n"
            "Use a Linux container or virtual machine, or two agents on localhost (lesson 05)."
        )
    return "namespaces" if os.geteuid() == 0 else "loopback"


def _find(folder: Path) -> Cluster | None:
    """Return the cluster of folder if it was made to the end and runs."""
    found = read_cluster(folder)
    ready = found and (folder / _READY).exists() and _KINDS[found.kind].is_up(found)
    return found if ready else None


def _same(found: Cluster, kind: str, nodes: int, rate: str | None) -> Cluster:
    if (found.kind, len(found.nodes), found.rate) != (kind, nodes, rate):
        raise ClusterError(
            f"cluster {found.name} is up already: {found.kind}, {len(found.nodes)} nodes,"
            f" rate {found.rate}.\n"
            f"Remove it first: python -m ddp_helpers cluster down --name {found.name}"
        )
    return found


def _parent() -> Path:
    return Path(tempfile.gettempdir()) / f"ddp_helpers_clusters-{os.geteuid()}"


@contextlib.contextmanager
def _folders_locked() -> Iterator[Path]:
    """Hold the lock of this user's clusters; yield the folder they lie in, removed when empty."""
    parent, descriptor = _parent(), None
    while descriptor is None:
        with contextlib.suppress(FileExistsError):
            parent.mkdir(mode=0o700)
        with contextlib.suppress(FileNotFoundError):  # removed by another down meanwhile
            descriptor = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            os.set_inheritable(descriptor, True)  # namespaces._run hands it on
            if parent.stat().st_ino != os.fstat(descriptor).st_ino:
                os.close(descriptor)
                descriptor = None
    try:
        seen = os.fstat(descriptor)
        if seen.st_uid != os.geteuid() or stat.S_IMODE(seen.st_mode) != 0o700:
            raise ClusterError(f"{parent} is not a private folder of this user: set TMPDIR.")
        yield parent
        with contextlib.suppress(OSError):
            parent.rmdir()  # fails while it holds a cluster
    finally:
        os.close(descriptor)


def _remove(folder: Path) -> bool:
    if not folder.exists():
        return False
    if found := read_cluster(folder):
        _KINDS[found.kind].remove(found)
    shutil.rmtree(folder)
    return True


if __name__ == "__main__":
    sys.stdin.buffer.read()  # returns when the process that made the cluster has gone
    down(sys.argv[1])
