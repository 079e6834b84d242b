"""How pytest --nbval runs a lesson: a private IPython folder, and no engine left behind."""

import os
import shutil
import tempfile
import time

import pytest

from ddp_helpers.lesson import processes
from ddp_helpers.lesson.nodes import why_no_nodes

IPYTHONDIR = pytest.StashKey[str]()
NEED_NODES = ("06_two_nodes", "08_when_it_hangs")


def pytest_collection_modifyitems(items):
    lessons = [item for item in items if item.path.suffix == ".ipynb"]
    for item in lessons:
        item.add_marker(pytest.mark.launcher)  # nearly every lesson starts engines
    on_nodes = [item for item in lessons if item.path.stem in NEED_NODES]
    # In CI it runs and fails, so that it is not lost.
    if on_nodes and os.environ.get("CI") != "true" and (reason := why_no_nodes()):
        for item in on_nodes:
            item.add_marker(pytest.mark.skip(reason=reason.partition("\n")[0]))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item):
    """Before the first cell starts the lesson's kernel: give it an IPython folder of its own."""
    stash = item.parent.stash
    if IPYTHONDIR not in stash:
        stash[IPYTHONDIR] = tempfile.mkdtemp(prefix="ddp_helpers_ipython_")
    before = os.environ.get("IPYTHONDIR")
    os.environ["IPYTHONDIR"] = stash[IPYTHONDIR]
    try:
        return (yield)
    finally:
        os.environ.pop("IPYTHONDIR")
        if before is not None:
            os.environ["IPYTHONDIR"] = before


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item, nextitem):
    """After the last cell, nbval kills the kernel: see that its engines end with it."""
    kernel = item.parent.kernel
    last = nextitem is None or nextitem.parent is not item.parent
    pid = kernel.km.provisioner.pid if last and kernel and kernel.is_alive() else None
    try:
        return (yield)
    finally:
        if last:
            shutil.rmtree(item.parent.stash[IPYTHONDIR], ignore_errors=True)
        if pid is not None:
            wait_until_gone(pid)


def wait_until_gone(pid: int, timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while left := processes.of_kernel(pid):
        if time.monotonic() > deadline:
            raise AssertionError(f"left behind by the lesson's kernel: {left}")
        time.sleep(0.05)
