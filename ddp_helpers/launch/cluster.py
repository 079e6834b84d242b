"""What a practice cluster is: its nodes, and the note of it in its private folder.

Made by practice_cluster.py. Lesson: notebooks/06_two_nodes.ipynb
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from .hosts import Host

_NOTE = "cluster.json"


class ClusterError(RuntimeError):
    """A practice cluster cannot be made or used; the text says why and what to type."""


@dataclass(frozen=True)
class Node:
    """One node: its name, and the name or address by which the launchers reach it."""

    name: str
    address: str
    host: str


@dataclass(frozen=True)
class Cluster:
    """A practice cluster, made or being made."""

    name: str
    folder: Path
    kind: str  # "namespaces" or "loopback"
    nodes: tuple[Node, ...]
    rate: str | None = None  # of each node's link, as tc writes it; None: no limit

    def hosts(self, slots: int = 2) -> tuple[Host, ...]:
        """Return the nodes as the hosts of a Job."""
        return tuple(Host(node.host, slots) for node in self.nodes)

    def node(self, name: str) -> Node:
        """Return the node of this name. Raises ClusterError when there is none."""
        for node in self.nodes:
            if node.name == name:
                return node
        names = ", ".join(node.name for node in self.nodes)
        raise ClusterError(f"no node {name} in cluster {self.name}.\nIt has: {names}.")

    @property
    def bin(self) -> Path:
        """The folder with the cluster's own ssh, which goes in front of this machine's PATH."""
        return self.folder / "bin"

    def environ(self, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
        """Return environ for programs of this machine that reach the nodes through ssh.

        ssh, launch --run and the mpirun of every flavour then know the names of the nodes.
        """
        path = f"{self.bin}{os.pathsep}{environ.get('PATH', os.defpath)}"
        return {**environ, "PATH": path}

    def write_ssh(self, script: str) -> None:
        """Make the program that environ() puts in front of this machine's ssh."""
        self.bin.mkdir(mode=0o700)
        ssh = self.bin / "ssh"
        ssh.write_text(f"#!/bin/sh\n{script}")
        ssh.chmod(0o700)

    def write(self) -> None:
        """Note in the folder what is being made, before it is made: it is found after a crash."""
        half_written = self.folder / f"{_NOTE}.new"
        half_written.write_text(json.dumps({**asdict(self), "folder": str(self.folder)}))
        half_written.replace(self.folder / _NOTE)


def read_cluster(folder: Path) -> Cluster | None:
    """Return the cluster that folder's note describes, None without one."""
    try:
        data = json.loads((folder / _NOTE).read_text())
    except (FileNotFoundError, NotADirectoryError):
        return None
    return Cluster(
        data["name"], folder, data["kind"], tuple(Node(**n) for n in data["nodes"]), data["rate"]
    )
