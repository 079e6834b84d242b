"""Names, addresses, interfaces, ports; and answers that may never come: standard library only.

Copy this file alone.
Lesson: notebooks/01_processes_and_ranks.ipynb
"""

from __future__ import annotations

import array
import contextlib
import ipaddress
import os
import queue
import re
import socket
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

if sys.platform == "linux":
    import fcntl


T = TypeVar("T")


def in_time(do: Callable[[], T], timeout_s: float) -> T:
    """Return do(), or raise TimeoutError after timeout_s seconds.

    For what cannot be interrupted, such as a question to a store whose process is stopped: do
    goes on in a thread that is left behind.
    """
    answers: queue.SimpleQueue = queue.SimpleQueue()

    def work() -> None:
        try:
            answers.put((do(), None))
        except BaseException as error:
            answers.put((None, error))

    threading.Thread(target=work, daemon=True).start()
    try:
        answer, error = answers.get(timeout=max(timeout_s, 0))
    except queue.Empty:
        raise TimeoutError(f"no answer in {timeout_s:.0f} s") from None
    if error is not None:
        raise error
    return answer


def resolve(name: str) -> str:
    """Return the address of a host name, IPv4 where there is one. Raises OSError if it has none."""
    found = socket.getaddrinfo(_bytes(name), None, type=socket.SOCK_STREAM)
    addresses = [entry[4][0] for entry in sorted(found, key=lambda entry: entry[0])]
    return addresses[0]  # AF_INET sorts before AF_INET6


def is_loopback(address: str) -> bool:
    """Return True when only this machine can reach address."""
    return ipaddress.ip_address(address.split("%")[0]).is_loopback


def is_mine(address: str) -> bool:
    """Return True when an interface of this machine has address."""
    with _socket_for(address, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def own_addresses() -> list[tuple[str, str]]:
    """Return (interface, address) of every interface that is up; empty where that is unknown."""
    if sys.platform != "linux":
        return []
    return _ipv4_addresses() + _ipv6_addresses()


def interface_to(address: str) -> str | None:
    """Return the interface from which this machine reaches address; None if it cannot be told.

    The kernel's routing table is asked by connecting a datagram socket, which sends nothing.
    """
    with _socket_for(address, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))
        except OSError:
            return None
        source = probe.getsockname()[0]
    for interface, own in own_addresses():
        if own == source or (is_loopback(source) and is_loopback(own)):
            return interface
    names = [name for _, name in socket.if_nameindex()]
    return "lo0" if is_loopback(source) and "lo0" in names else None  # macOS


def outward_interface() -> str | None:
    """Return the interface of the default route, or the only one that is not loopback."""
    # An address reserved for documentation (RFC 5737): the default route leads there.
    if interface := interface_to("192.0.2.1"):
        return interface
    others = {name for name, address in own_addresses() if not is_loopback(address)}
    return others.pop() if len(others) == 1 else None


def listen(address: str, port: int) -> socket.socket:
    """Return a socket that listens on port (0: any free one), and on all IPv4 addresses.

    On all IPv6 addresses, if address is one. Raises OSError where the port is in use
    (EADDRINUSE) or is not for this user (EACCES).
    """
    return socket.create_server(("", port), family=_family(address))


def free_port() -> int:
    """Return a port that is free now. Call it on one rank only, and tell the others."""
    with listen("127.0.0.1", 0) as server:
        return server.getsockname()[1]


def wait_for_listener(address: str, port: int, timeout_s: float) -> str | None:
    """Wait until something listens at address:port; return None, or why nothing did in time."""
    began = time.monotonic()
    deadline = began + timeout_s
    while True:
        left = max(deadline - time.monotonic(), 0.05)
        try:
            socket.create_connection((_bytes(address), port), timeout=left).close()
            return None
        except ConnectionRefusedError:
            reason = "connection refused: nothing listens there"
        except TimeoutError:
            reason = "no reply: the host is down, or a firewall drops the packets"
        except OSError as error:
            reason = error.strerror or str(error)
        now = time.monotonic()
        if now > deadline:
            return reason
        time.sleep(min(max((now - began) / 20, 0.0002), 0.05))  # short at first: rank 0 is near


def port_owner(port: int) -> str | None:
    """Return 'pid 123 (python)' of the process listening on port; None where that is hidden."""
    inodes = _listening_inodes(port)
    for link in Path("/proc").glob("[0-9]*/fd/*") if inodes else ():
        try:
            if os.readlink(link) in inodes:
                process = link.parent.parent
                return f"pid {process.name} ({(process / 'comm').read_text().strip()})"
        except OSError:  # another user's process, or one that has just ended
            continue
    return None


def write_meeting_port(port: int) -> None:
    """On rank 0: tell the other ranks of a one-node job a port, without any port fixed before."""
    path = _meeting_file()
    path.parent.mkdir(mode=0o700, exist_ok=True)
    if path.parent.stat().st_uid != os.getuid():
        raise PermissionError(
            f"{path.parent} belongs to another user: set TMPDIR to a folder of yours."
        )
    half_written = path.with_suffix(f".{os.getpid()}")
    half_written.write_text(str(port))
    half_written.replace(path)


def read_meeting_port(timeout_s: float) -> int:
    """Return the port rank 0 has written, waiting up to timeout_s seconds for it."""
    path, deadline = _meeting_file(), time.monotonic() + timeout_s
    while True:
        with contextlib.suppress(FileNotFoundError):
            return int(path.read_text())
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"rank 0 did not write {path} within {timeout_s:g} s: has it started?"
            )
        time.sleep(0.01)


def remove_meeting_port() -> None:
    """On rank 0: forget the port, once every rank has read it."""
    _meeting_file().unlink(missing_ok=True)


def _meeting_file() -> Path:
    """Return a path that the ranks of one job on one node have in common, and no other job."""
    environ = os.environ
    job = environ.get("PMIX_NAMESPACE") or "-".join(
        environ.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID")
    )
    if not job.strip("-"):
        job = f"parent-{os.getppid()}"  # hydra names no job, but starts all its ranks itself
    name = re.sub(r"[^A-Za-z0-9.-]", "_", job)
    return Path(tempfile.gettempdir()) / f"ddp_helpers-{os.getuid()}" / name


def _bytes(name: str) -> str | bytes:
    """Return name in the form for which Python does not import its IDNA tables (milliseconds)."""
    return name.encode() if name.isascii() else name


def _socket_for(address: str, kind: socket.SocketKind) -> socket.socket:
    return socket.socket(_family(address), kind)


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _ipv4_addresses() -> list[tuple[str, str]]:
    entry = 40  # bytes in a struct ifreq: the name in the first 16, the address at 20
    buffer = array.array("B", bytes(entry * 256))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("iL", len(buffer), buffer.buffer_info()[0])
        answer = fcntl.ioctl(probe.fileno(), 0x8912, request)  # SIOCGIFCONF, netdevice(7)
    found = []
    for start in range(0, struct.unpack("iL", answer)[0], entry):
        one = buffer[start : start + entry].tobytes()
        name = one[:16].split(b"\0")[0].decode()
        found.append((name.split(":")[0], socket.inet_ntoa(one[20:24])))  # eth0:1 is eth0
    return found


def _ipv6_addresses() -> list[tuple[str, str]]:
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:
        return []
    rows = [line.split() for line in lines]
    return [(row[5], socket.inet_ntop(socket.AF_INET6, bytes.fromhex(row[0]))) for row in rows]


def _listening_inodes(port: int) -> set[str]:
    """Return 'socket:[inode]' of every socket that listens on port, from /proc/net."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        for row in (line.split() for line in lines):
            if row[3] == "0A" and int(row[1].rsplit(":", 1)[1], 16) == port:  # 0A: listening
                inodes.add(f"socket:[{row[9]}]")
    return inodes
