"""Let a signal end training in good order: all ranks stop after the same step, and can save.

Copy with network.py.

    with stop_notice(device) as stop_now:
        for batch in loader:
            ...                       # backward() of a DDP model, optimizer.step()
            if stop_now():            # every rank, once after each step
                save(...)
                raise SystemExit(STOPPED)

A scheduler sends SIGTERM, to one process or to all, some seconds before it kills them.
Source: signal(7). Lesson: notebooks/08_when_it_hangs.ipynb
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist

try:
    from .network import in_time
except ImportError:  # copied next to a script
    from network import in_time

# Of a process that SIGTERM ends, and not 0: the work is not done. A launcher or scheduler that
# starts jobs again on failure does it for this status, and one that goes on to the next job not.
STOPPED = 128 + signal.SIGTERM

_KEY = "ddp_helpers/stop after step"
_ANSWER_S = 60.0  # a store answers in milliseconds, unless its process is stopped


@contextlib.contextmanager
def stop_notice(
    device: torch.device,
    signals: Sequence[int] = (signal.SIGTERM, signal.SIGUSR1),
    grace_s: float = 20.0,
) -> Iterator[Callable[[], bool]]:
    """Catch signals for the with block and yield a function to call once after each step.

    When any rank was sent one of signals, the function returns True on all ranks after the same
    step, at most two steps later. It costs one question to the process group's store. A rank that
    hangs in a collective cannot answer: grace_s seconds after the signal it ends with STOPPED.
    Outside the main thread, where Python hands out no signals, it only hears of the others'.
    """
    noticed = threading.Event()
    with contextlib.ExitStack() as stack:
        if threading.current_thread() is threading.main_thread():
            stack.enter_context(_handled(signals, lambda number, frame: noticed.set()))
            stack.enter_context(_ends_if_deaf(signals, noticed, grace_s))
        if dist.is_initialized() and dist.get_world_size() > 1:
            yield _agreement(noticed, device)
        else:
            yield noticed.is_set


def _agreement(noticed: threading.Event, device: torch.device) -> Callable[[], bool]:
    """Return the function for several ranks.

    A rank that was sent the signal says after step s: stop after s + 2. Between lies the exchange
    of gradients in step s + 1, which no rank finishes before all have begun it, so that no rank
    comes to the end of step s + 2 without reading this.
    """
    store = dist.distributed_c10d._get_default_store()  # torch has no public name for it
    wait_for_step_before = _pacemaker(device)
    step = 0

    def stop_now() -> bool:
        nonlocal step
        step += 1
        wait_for_step_before()
        try:
            return in_time(ask, _ANSWER_S)
        except TimeoutError:
            raise RuntimeError(
                f"The store has not answered in {_ANSWER_S:g} s (timed out): rank 0 is stopped,"
                " or its node has gone."
            ) from None

    def ask() -> bool:
        if noticed.is_set():
            store.compare_set(_KEY, "", str(step + 2))  # the first rank to say it decides
        return store.check([_KEY]) and step >= int(store.get(_KEY))

    return stop_now


def _pacemaker(device: torch.device) -> Callable[[], None]:
    """Return a function that waits until the device has done the step before the last.

    On a GPU, Python is ahead of the device and of the exchanges there. One step ahead is enough
    to keep the device busy.
    """
    if device.type != "cuda":
        return lambda: None
    done = [torch.cuda.Event(), torch.cuda.Event()]

    def wait_for_step_before() -> None:
        done.append(done.pop(0))
        done[1].record(torch.cuda.current_stream(device))
        done[0].synchronize()  # returns at once when it was never recorded

    return wait_for_step_before


@contextlib.contextmanager
def _handled(signals: Sequence[int], handler: Callable) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in signals}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, signal.SIG_DFL if old is None else old)


@contextlib.contextmanager
def _ends_if_deaf(
    signals: Sequence[int], noticed: threading.Event, grace_s: float
) -> Iterator[None]:
    """End the process when a signal has come and the main thread does not run its handler.

    Python runs handlers between two steps of Python code. A collective that waits for a rank
    that is gone is one long step; torch's own timeout for it is far longer than a scheduler's.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)  # written to at once

    def watch() -> None:
        while number := os.read(reader, 1)[0]:
            if number in signals and not noticed.wait(grace_s):
                os._exit(STOPPED)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        noticed.set()
        os.write(writer, b"\0")  # closing it would not do: a process forked meanwhile has it too
        thread.join()
        os.close(reader)
        os.close(writer)
