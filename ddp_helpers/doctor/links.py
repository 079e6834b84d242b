"""Can the ranks reach each other, and how fast? Plain TCP, on ports like those that gloo takes.

Every rank listens; every rank tries all others, in both directions. A process group is not
needed, so a link that fails is found and named before one is tried.
Lesson: notebooks/08_when_it_hangs.ipynb
"""

from __future__ import annotations

import contextlib
import socket
import statistics
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

CONNECT_S = 4.0
_PINGS = 50
_STREAM_S = 0.4
_CHUNK = bytes(1 << 16)

Place = tuple[str, int]  # address, port


class Listener:
    """Answers the other ranks until the with block ends: who it is, pings, and streams."""

    def __init__(self, rank: int, address: str):
        self._rank = rank
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = socket.create_server((address, 0), family=family, backlog=256)
        self.place: Place = self._socket.getsockname()[:2]

    def __enter__(self) -> Listener:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes accept, which would keep it open
        self._socket.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                connection, _ = self._socket.accept()
                threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.settimeout(30)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            task = connection.recv(1)
            if task == b"?":
                connection.sendall(f"rank {self._rank}".encode())
            elif task == b"p":
                while ping := connection.recv(1):
                    connection.sendall(ping)
            elif task == b"s":
                connection.sendall(f"{_receive_all(connection):.0f}".encode())


def _receive_all(connection: socket.socket) -> float:
    """Return the bits per second of what comes until the other side has sent all."""
    received, began = len(connection.recv(len(_CHUNK))), time.monotonic()
    while part := connection.recv(len(_CHUNK)):
        received += len(part)
    return 8 * received / max(time.monotonic() - began, 1e-9)


def reach(places: Mapping[int, Place]) -> dict[int, str]:
    """Try every rank at its place, all at once; return why each could not be reached, or ""."""
    if not places:
        return {}
    with ThreadPoolExecutor(max_workers=min(len(places), 64)) as threads:
        return dict(zip(places, threads.map(_try, places, places.values()), strict=True))


def _try(rank: int, place: Place) -> str:
    try:
        with _connect(place, b"?") as connection:
            answer = connection.recv(64).decode(errors="replace")
    except ConnectionRefusedError:
        return "connection refused"
    except TimeoutError:
        return f"no reply in {CONNECT_S:g} s"
    except OSError as error:
        return error.strerror or str(error)
    return "" if answer == f"rank {rank}" else f"something else answers there: {answer!r}"


def measure(place: Place) -> tuple[float, float]:
    """Return (seconds of a round trip, bits per second) to a listener. Raises OSError.

    The median of 50 round trips of one byte; a stream of 0.4 s, as the far side has received it.
    """
    with _connect(place, b"p") as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        times = []
        for _ in range(_PINGS):
            began = time.perf_counter()
            connection.sendall(b".")
            connection.recv(1)
            times.append(time.perf_counter() - began)
    with _connect(place, b"s") as connection:
        # A send returns when the kernel has taken the bytes; on a slow link they queue there.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 19)
        connection.settimeout(30)
        end = time.monotonic() + _STREAM_S
        while time.monotonic() < end:
            connection.sendall(_CHUNK)
        connection.shutdown(socket.SHUT_WR)
        rate = float(connection.recv(64) or 0)
    return statistics.median(times), rate


def _connect(place: Place, task: bytes) -> socket.socket:
    connection = socket.create_connection(place, timeout=CONNECT_S)
    connection.sendall(task)
    return connection


def rounds(nodes: Sequence[str]) -> list[list[tuple[str, str]]]:
    """Return all pairs of nodes, in rounds in which no node comes twice (the circle method)."""
    circle = [*nodes, *([""] if len(nodes) % 2 else [])]
    found = []
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        pairs = zip(circle[:half], reversed(circle[half:]), strict=True)
        found.append([(a, b) for a, b in pairs if a and b])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return found
