"""Where ranks run: host names, and how many ranks each host takes.

    parse_hosts("node-a:2,node-b:2")     # what --hosts and mpirun -H take
    read_hostfile("hosts.txt")           # Open MPI's `node-a slots=2`, or hydra's `node-a:2`

Lesson: notebooks/06_two_nodes.ipynb
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


class HostfileError(ValueError):
    """A list of hosts cannot be used; the text says where, what was seen and what to write."""


@dataclass(frozen=True)
class Host:
    """One machine, and how many ranks it runs."""

    name: str
    slots: int = 1


_NAME = r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?"
_COUNT = r"0*[1-9][0-9]{0,5}"
_HOST = re.compile(rf"({_NAME})(?::({_COUNT}))?")
_SLOTS = re.compile(rf"slots=({_COUNT})")
_MAX_SLOTS = re.compile(r"max[-_]slots=[0-9]+")  # Open MPI's upper limit: it places no rank


def local(n: int) -> tuple[Host, ...]:
    """Return the hosts of a job with n ranks on this machine."""
    return (Host("localhost", n),)


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Return the hosts of "node-a:2,node-b:2"; a name without a number runs one rank.

    Raises HostfileError.
    """
    hosts = []
    for part in text.split(","):
        match = _HOST.fullmatch(part.strip())
        if not match:
            raise HostfileError(
                f"hosts {text!r}: {part.strip()!r} is not NAME:SLOTS with SLOTS >= 1.\n"
                "Write it as: node-a:2,node-b:2"
            )
        hosts.append(Host(match[1], int(match[2] or 1)))
    return _each_once(hosts, f"hosts {text!r}", "{name}:{slots}")


def read_hostfile(path: str | Path) -> tuple[Host, ...]:
    """Return the hosts of a hostfile, in its order; # starts a comment, blank lines are skipped.

    Every line must give its slots: without them Open MPI takes the host's number of cores, and
    hydra takes 1. Raises HostfileError with the line number.
    """
    try:
        lines = Path(path).read_text().splitlines()
    except OSError as error:
        raise HostfileError(f"hostfile {path}: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise HostfileError(f"hostfile {path} is not a text file.") from None
    texts = [line.partition("#")[0].strip() for line in lines]
    hosts = [_parse_line(text, f"{path} line {n}") for n, text in enumerate(texts, 1) if text]
    if not hosts:
        raise HostfileError(f"{path} names no host.\nWrite one host a line: node-a slots=2")
    return _each_once(hosts, str(path), "{name} slots={slots}")


def _parse_line(text: str, place: str) -> Host:
    """Return the host of `node-a slots=2 max_slots=4` or `node-a:2`."""
    name, *settings = re.sub(r"\s*=\s*", "=", text).split()
    match = _HOST.fullmatch(name)
    if not match:
        raise HostfileError(
            f"{place}: {name!r} is not a host name, nor NAME:SLOTS with SLOTS >= 1.\n"
            "Write it as: node-a slots=2"
        )
    counts = [match[2]] if match[2] else []
    for setting in settings:
        if found := _SLOTS.fullmatch(setting):
            counts.append(found[1])
        elif not _MAX_SLOTS.fullmatch(setting):
            raise HostfileError(
                f"{place}: {setting!r} is not slots=N with N >= 1.\nWrite it as: {match[1]} slots=2"
            )
    if len(counts) != 1:
        seen = "gives two slot counts" if counts else "does not say how many ranks the host runs"
        raise HostfileError(f"{place}: {text!r} {seen}.\nWrite it as: {match[1]} slots=2")
    return Host(match[1], int(counts[0]))


def _each_once(hosts: Iterable[Host], place: str, form: str) -> tuple[Host, ...]:
    """Return hosts as a tuple; raise HostfileError when a name comes twice."""
    slots: dict[str, int] = {}
    for host in hosts:
        if host.name in slots:
            # Launchers disagree on what it means: the sum, the last one, or an error.
            once = form.format(name=host.name, slots=slots[host.name] + host.slots)
            raise HostfileError(f"{place}: {host.name} comes twice.\nWrite it once: {once}")
        slots[host.name] = host.slots
    return tuple(Host(name, count) for name, count in slots.items())
