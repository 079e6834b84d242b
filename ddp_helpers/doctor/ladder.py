"""The doctor in every rank: one step after the other, each with its own deadline.

    variables -> master -> meeting -> links -> speeds -> process group: a ring, a sum

The ranks talk through rank 0's store, which works long before a process group does. So a rank that
is missing, does not answer or cannot reach another is named, and the others still report.
Lesson: notebooks/08_when_it_hangs.ipynb
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ddp_helpers.doctor import links
from ddp_helpers.doctor.facts import Facts, from_json, gather
from ddp_helpers.worker import network
from ddp_helpers.worker.environment import LaunchEnvironment
from ddp_helpers.worker.process_group import process_group
from ddp_helpers.worker.rendezvous import RendezvousError, check_master, connect

_ANSWER_S = links.CONNECT_S + 4.0  # for a step that takes a rank no longer than a connection
_GROUP_S = 15.0


@dataclass
class World:
    """What rank 0 has learned: all that a verdict needs."""

    launcher: str
    world_size: int
    facts: dict[int, Facts] = field(default_factory=dict)
    waited_s: float = 0.0  # for the facts
    silent: dict[str, list[int]] = field(default_factory=dict)  # step -> ranks without an answer
    unreachable: dict[tuple[int, int], str] = field(default_factory=dict)  # (from, to) -> why
    speeds: dict[tuple[str, str], tuple[float, float]] = field(default_factory=dict)  # of nodes
    group: dict[int, str] = field(default_factory=dict)  # rank -> why it failed there
    twice: dict[int, str] = field(default_factory=dict)  # rank -> the second process that has it


class Board:
    """What the ranks tell each other through the store."""

    def __init__(self, env: LaunchEnvironment, deadline: float):
        store = connect(env, deadline)
        store.set_timeout(timedelta(seconds=_ANSWER_S))
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._store = dist.PrefixStore(f"doctor/{attempt}", store)
        self._rank = env.rank

    def sign_in(self) -> None:
        """Raise RendezvousError when another process has this rank."""
        me = f"pid {os.getpid()} on {socket.gethostname()}"
        if self._store.add(f"starts of {self._rank}", 1) == 1:
            self._store.set(f"who is {self._rank}", me)
            return
        self._store.set(f"twice {self._rank}", me)
        other = self._store.get(f"who is {self._rank}").decode()
        raise RendezvousError(
            f"rank {self._rank} was started twice: {other}, and {me}.\n"
            "Stop the older job, or give each job a MASTER_PORT of its own."
        )

    def post(self, step: str, value: Any) -> None:
        """Give this rank's answer in a step."""
        self._store.set(f"{step} {self._rank}", json.dumps(value))

    def twice(self, ranks: Iterable[int]) -> dict[int, str]:
        """Return the second process of each rank that was started twice."""
        keys = {rank: f"twice {rank}" for rank in ranks}
        return {r: self._store.get(k).decode() for r, k in keys.items() if self._store.check([k])}

    def collect(self, step: str, ranks: Iterable[int], deadline: float) -> dict[int, Any]:
        """Return the answers of ranks that have come by the deadline."""
        waiting, found = set(ranks), {}
        while True:
            for rank in sorted(waiting):
                if self._store.check([f"{step} {rank}"]):
                    found[rank] = json.loads(self._store.get(f"{step} {rank}"))
            waiting -= set(found)
            if not waiting or time.monotonic() > deadline:
                return found
            time.sleep(0.01)

    def tell(self, step: str, value: Any) -> None:
        """On rank 0: say what is to be done in a step."""
        self._store.set(f"do {step}", json.dumps(value))

    def hear(self, step: str, timeout_s: float) -> Any:
        """Return what rank 0 has told; raises RendezvousError when it does not."""
        deadline = time.monotonic() + timeout_s
        while not self._store.check([f"do {step}"]):
            if time.monotonic() > deadline:
                raise RendezvousError(
                    f"rank {self._rank} waited {timeout_s:g} s for rank 0 to go on ({step}).\n"
                    "Rank 0 has ended, hangs or was stopped: look at its output."
                )
            time.sleep(0.01)
        return json.loads(self._store.get(f"do {step}"))


def climb(
    env: LaunchEnvironment,
    backend: str,
    timeout_s: float,
    judge: Callable[[World], bool],
    say: Callable[[str], None],
) -> bool:
    """Go through all steps; every rank must call it. Returns True when the ranks are healthy.

    On rank 0, judge tells from what was learned, and say is given a line for each step.
    timeout_s is how long to wait for all ranks. Raises LaunchEnvironmentError and
    RendezvousError on a rank that cannot take part.
    """
    interface = check_master(env)
    try:
        return _climb(env, backend, timeout_s, interface, judge, say)
    except dist.DistError as error:
        raise RendezvousError(
            f"the connection to rank 0's store has failed: {str(error).splitlines()[0]}\n"
            "Rank 0 has ended, or its node has: look at the output of rank 0."
        ) from error


def _climb(env, backend, timeout_s, interface, judge, say) -> bool:
    board = Board(env, time.monotonic() + timeout_s)
    board.sign_in()
    facts = gather(env, backend, interface)
    with contextlib.ExitStack() as stack:
        if facts.address:
            listener = stack.enter_context(links.Listener(env.rank, facts.address))
            facts = replace(facts, place=listener.place)
        board.post("facts", facts.as_json())
        if env.rank == 0:
            return _lead(env, backend, timeout_s, board, judge, say)
        return _follow(env, backend, timeout_s, board)


def _lead(env, backend, timeout_s, board: Board, judge, say) -> bool:
    world = World(env.launcher, env.world_size)
    began = time.monotonic()
    found = board.collect("facts", range(env.world_size), began + timeout_s)
    world.facts = {rank: from_json(fields) for rank, fields in sorted(found.items())}
    world.waited_s = timeout_s
    missing = [rank for rank in range(env.world_size) if rank not in found]
    say(f"meeting        {len(found)} of {env.world_size} ranks came")
    if env.master_addr is None:
        network.remove_meeting_port()

    places = {rank: facts.place for rank, facts in world.facts.items() if facts.place}
    board.tell("links", places)
    board.post("links", links.reach(_others(places, 0)))
    for rank, answers in _collect(world, board, "links").items():
        for other, why in answers.items():
            if why:
                world.unreachable[rank, int(other)] = why
    pairs = len(places) * (len(places) - 1)
    say(f"links          {pairs - len(world.unreachable)} of {pairs} connections between ranks")

    for number, pairs in enumerate(_rounds(world)):
        board.tell(f"speeds {number}", pairs)
        _measure(board, f"speeds {number}", pairs, places, 0)
        for rank, answer in _collect(world, board, f"speeds {number}").items():
            if answer:
                nodes = world.facts[rank].host, world.facts[dict(pairs)[rank]].host
                world.speeds[nodes] = tuple(answer)
    board.tell("speeds end", None)

    ready = not missing and not world.silent and not world.unreachable
    ready = ready and len(places) == env.world_size
    board.tell("group", ready)
    if ready:
        board.post("group", _try_group(env, backend))
        failures = _collect(world, board, "group", _GROUP_S + 10)
        world.group = {rank: why for rank, why in failures.items() if why}
        say(f"process group  {len(failures) - len(world.group)} of {env.world_size} ranks")
    world.twice = board.twice(world.facts)
    healthy = judge(world)
    board.tell("end", healthy)
    # The store ends with this process: the others must have heard.
    board.post("heard", True)
    board.collect("heard", world.facts, time.monotonic() + 2)
    return healthy


def _follow(env, backend, timeout_s, board: Board) -> bool:
    places = {int(rank): tuple(p) for rank, p in board.hear("links", timeout_s + 5).items()}
    board.post("links", links.reach(_others(places, env.rank)))
    number = 0
    while (pairs := _hear_round(board, number)) is not None:
        _measure(board, f"speeds {number}", pairs, places, env.rank)
        number += 1
    if board.hear("group", _ANSWER_S):
        board.post("group", _try_group(env, backend))
    healthy = board.hear("end", _GROUP_S + 15)
    board.post("heard", True)
    return healthy


def _hear_round(board: Board, number: int) -> list[list[int]] | None:
    """Return the pairs of the next round, None after the last."""
    deadline = time.monotonic() + 2 * _ANSWER_S
    while time.monotonic() < deadline:
        for step in (f"speeds {number}", "speeds end"):
            with contextlib.suppress(RendezvousError):
                return board.hear(step, 0)
        time.sleep(0.01)
    return board.hear("speeds end", 0)


def _collect(world: World, board: Board, step: str, timeout_s: float = _ANSWER_S) -> dict:
    """Collect the answers of all ranks that came and still answer; note who does not."""
    lost = {rank for ranks in world.silent.values() for rank in ranks}
    asked = [rank for rank in world.facts if rank not in lost]
    answers = board.collect(step, asked, time.monotonic() + timeout_s)
    if late := [rank for rank in asked if rank not in answers]:
        world.silent[step.split()[0]] = late
    return answers


def _others(places: dict[int, links.Place], rank: int) -> dict[int, links.Place]:
    return {other: place for other, place in places.items() if other != rank}


def _rounds(world: World) -> list[list[tuple[int, int]]]:
    """Return the rounds in which one rank of each node measures the way to another node's."""
    lost = {rank for ranks in world.silent.values() for rank in ranks}
    broken = {rank for pair in world.unreachable for rank in pair}
    first = {
        facts.host: rank
        for rank, facts in sorted(world.facts.items(), reverse=True)
        if facts.place and rank not in lost | broken
    }
    if len(first) < 2:
        return []
    return [[(first[a], first[b]) for a, b in pairs] for pairs in links.rounds(sorted(first))]


def _measure(board: Board, step: str, pairs: Sequence[Sequence[int]], places, rank: int) -> None:
    """If this rank is the first of a pair, measure the way to the second; answer in any case."""
    answer = None
    for a, b in pairs:
        if a == rank:
            with contextlib.suppress(OSError):
                answer = links.measure(tuple(places[b]))
    board.post(step, answer)


def _try_group(env: LaunchEnvironment, backend: str) -> str:
    """Open the process group as a job does, send around a ring, sum; return why it failed."""
    n, rank = env.world_size, env.rank
    try:
        with process_group(env, backend, _GROUP_S) as device:
            mine, got = (torch.full((1,), float(rank), device=device) for _ in range(2))
            if n > 1:
                sending = dist.isend(mine, (rank + 1) % n)
                dist.recv(got, (rank - 1) % n)
                sending.wait()
                if got.item() != (rank - 1) % n:
                    return f"received {got.item()} from rank {(rank - 1) % n} in a ring"
            dist.all_reduce(mine)
            if mine.item() != n * (n - 1) / 2:
                return f"the sum of all ranks was {mine.item()}, expected {n * (n - 1) / 2}"
    except Exception as error:  # whatever it is, it is what a job would have died of
        return str(error) or type(error).__name__
    return ""
