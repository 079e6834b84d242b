"""A notebook's nodes are reached by name, end without a trace, and say what they need."""

import os
import subprocess
import sys

import pytest

from ddp_helpers.launch import namespaces
from ddp_helpers.launch.cluster import ClusterError
from ddp_helpers.launch.mpi import Mpi
from ddp_helpers.lesson import nodes
from ddp_helpers.lesson.nodes import NodesNotStarted, start_nodes, why_no_nodes


@pytest.mark.launcher
def test_ssh_reaches_the_nodes_by_name_until_they_are_stopped(require):
    reason = why_no_nodes()
    require(not reason, reason)
    path = os.environ["PATH"]
    first = start_nodes()
    try:
        assert repr(first) == "<node1, node2 on this machine>"
        again = start_nodes()  # the cell runs a second time
        done = subprocess.run(["ssh", "-n", "node2", "hostname"], capture_output=True, text=True)
        assert done.stdout == "node2\n"
        again.stop()
    finally:
        first.stop()
    assert os.environ["PATH"] == path
    assert not first.cluster.folder.exists()


def test_without_root_it_says_what_to_do_and_shows_no_call_stack(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(NodesNotStarted, match="sudo make lab") as caught:
        start_nodes()
    assert caught.value._render_traceback_()[0].startswith("NodesNotStarted: this lesson")


def missing_sshd(rate):
    raise ClusterError("sshd not found.\nInstall it: apt-get install openssh-server")


@pytest.mark.parametrize(
    ("check", "allowed", "reason"),
    [
        (missing_sshd, "1", "sshd not found"),
        (lambda rate: None, "0", "export OMPI_ALLOW_RUN_AS_ROOT=1"),
    ],
)
def test_what_root_lacks_is_named(monkeypatch, check, allowed, reason):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(namespaces, "check", check)
    monkeypatch.setattr(nodes, "find_mpirun", lambda: Mpi("Open MPI", (5, 0), "mpirun"))
    monkeypatch.setenv("OMPI_ALLOW_RUN_AS_ROOT", allowed)
    with pytest.raises(NodesNotStarted, match=reason):
        start_nodes()
