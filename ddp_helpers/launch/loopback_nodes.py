"""Nodes without root: loopback addresses of this machine, and a stand-in for ssh.

Launchers treat 127.0.0.2 and 127.0.0.3 as two hosts: one agent or daemon each, local ranks from 0,
a clean environment on the far side. What they cannot show is what they share: one host name, one
network without a rate, one file system, and no keys.
Lesson: notebooks/06_two_nodes.ipynb
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

from .cluster import Cluster, ClusterError, Node

# As ssh does: options first, then the host, then words that a shell puts together again.
_SSH = """\
# Stands in for ssh: leaves the host out and runs the rest here, with a new login's environment.
while :; do
  case "$1" in
    -[BbcDEeFIiJLlmOopQRSWw]) shift 2 ;;
    -*) shift ;;
    *) break ;;
  esac
done
shift
cd || exit 255
exec env -i HOME="$HOME" USER="${USER:-}" PATH=/usr/local/bin:/usr/bin:/bin sh -c "$*"
"""

WHAT_IT_IS_NOT = (
    "These nodes are loopback addresses of one machine: no keys, one host name, no link to limit.\n"
    "For two real nodes on this machine: sudo python -m ddp_helpers cluster up"
)


def check(rate: str | None) -> None:
    """Raise ClusterError where there are no loopback addresses, or for a rate."""
    if rate is not None:
        raise ClusterError("loopback nodes have no link of their own: --rate needs root on Linux.")
    if sys.platform != "linux":
        raise ClusterError("only Linux has the loopback addresses 127.0.0.2 and up.")


def make(cluster: Cluster, number: int) -> Cluster:
    """Make number nodes: write the stand-in for ssh, and the note."""
    addresses = [f"127.0.0.{n + 1}" for n in range(1, number + 1)]
    # Their hosts are addresses: nobody resolves their names.
    nodes = tuple(Node(f"node{n}", each, each) for n, each in enumerate(addresses, 1))
    cluster = replace(cluster, nodes=nodes)
    cluster.write()
    cluster.write_ssh(_SSH)
    return cluster


def is_up(cluster: Cluster) -> bool:
    """Return True: an address needs no process."""
    return True


def remove(cluster: Cluster) -> None:
    """Do nothing: there is only the folder."""


def command(cluster: Cluster, node: Node, argv: Sequence[str]) -> tuple[str, ...]:
    """Return the command that runs argv on node: here, with the stand-in for ssh on PATH."""
    return ("env", f"PATH={cluster.environ()['PATH']}", *argv)


def processes(cluster: Cluster) -> dict[str, list[tuple[int, str]]]:
    """Return no process: they cannot be told from the machine's others."""
    return {node.name: [] for node in cluster.nodes}
