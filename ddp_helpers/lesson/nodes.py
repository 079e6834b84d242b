"""Two nodes for a notebook: after start_nodes() its ssh and mpirun know node1 and node2.

    nodes = start_nodes()
    !ssh node1 hostname
    nodes.stop()

They are a practice cluster, and end with the notebook's kernel.
Lesson: notebooks/06_two_nodes.ipynb, notebooks/08_when_it_hangs.ipynb
"""

from __future__ import annotations

import atexit
import os
import sys
from contextlib import ExitStack

from ddp_helpers.launch import namespaces
from ddp_helpers.launch.cluster import Cluster, ClusterError
from ddp_helpers.launch.mpi import LauncherNotFound, LauncherRefused, check_root, find_mpirun
from ddp_helpers.launch.practice_cluster import practice_cluster

_NO_ROOT = """\
this lesson makes two nodes on this machine, and that takes root on Linux.
Start JupyterLab with: sudo make lab, or in a container that runs with --privileged.
Without root read on: the outputs stored here are those of these very cells.
To type its launch lines yourself, as far as that goes without root:
python -m ddp_helpers cluster up"""


class NodesNotStarted(RuntimeError):
    """There are no nodes; the text says why and what to do."""

    def _render_traceback_(self) -> list[str]:  # IPython shows this, and not our own call stack
        return f"{type(self).__name__}: {self}".splitlines()


def start_nodes(count: int = 2, rate: str | None = None) -> Nodes:
    """Make count nodes on this machine and let ssh and mpirun of this process reach them by name.

    Prints nothing. rate limits each node's link, such as "200mbit". Raises NodesNotStarted.
    """
    if reason := why_no_nodes():
        raise NodesNotStarted(reason)
    try:
        return Nodes(count, rate)
    except ClusterError as error:
        raise NodesNotStarted(f"{error}") from None


def why_no_nodes() -> str:
    """Return why this machine and user cannot make nodes, "" where they can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return _NO_ROOT
    try:
        namespaces.check(None)
        check_root(find_mpirun())
    except (ClusterError, LauncherNotFound, LauncherRefused) as error:
        return str(error)
    return ""


class Nodes:
    """The nodes of a notebook; start_nodes makes one."""

    def __init__(self, count: int, rate: str | None):
        self._keep_open = ExitStack()
        self.cluster: Cluster = self._keep_open.enter_context(
            practice_cluster(nodes=count, rate=rate)
        )
        # Also keeps this alive: when the cell runs twice, both hold the same cluster, which must
        # not end with the first.
        atexit.register(self.stop)
        os.environ.update(self.cluster.environ())

    def __repr__(self) -> str:
        return f"<{', '.join(node.name for node in self.cluster.nodes)} on this machine>"

    def stop(self) -> None:
        """Remove the nodes with all that runs on them; nothing is left on the machine."""
        self._keep_open.close()
        atexit.unregister(self.stop)
        places = os.environ["PATH"].split(os.pathsep)
        os.environ["PATH"] = os.pathsep.join(p for p in places if p != str(self.cluster.bin))
