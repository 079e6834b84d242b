"""The part of a %%px cell that runs inside each rank. Standard library and IPython only.

A cell's text goes to a file and not through the engine's messages: so nothing is lost when the
rank raises, hangs or dies, prints of Python, of C and of child processes keep their order, and
the notebook can read it at any moment.
"""

from __future__ import annotations

import ast
import contextlib
import faulthandler
import gc
import io
import linecache
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def prepare(folders: list[str], master_addr: str, master_port: int) -> dict[str, Any]:
    """Make this engine ready for run_cell and return who it is, as MPI sees it.

    folders: where the ranks write, rank 0's first.
    """
    from mpi4py import MPI

    from ddp_helpers.launch.mpi import mpi_library_path

    rank = MPI.COMM_WORLD.Get_rank()
    version = MPI.Get_library_version().splitlines()[0].split(",")[0]
    # One stdout for the engine's life, so that a logger made in one cell still works in the next.
    sys.stdout, sys.stderr = _writer(1), _writer(2)
    stack = open(Path(folders[rank], f"stack_of_{os.getpid()}"), "w")  # noqa: SIM115 (stays open)
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True, chain=False)
    os.environ.update(MASTER_ADDR=master_addr, MASTER_PORT=str(master_port))
    return {
        "rank": rank,
        "size": MPI.COMM_WORLD.Get_size(),
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "library": f"{version} ({mpi_library_path()})",
    }


def run_cell(source: str, name: str, output: str) -> dict[str, Any]:
    """Run source as a notebook cell would, with its text written to the file output.

    Returns {"error": None or a dict, "displays": [(data, metadata), ...]}: pictures and other
    rich output, which a text file cannot hold.
    """
    from IPython import get_ipython
    from IPython.core.displaypub import CapturingDisplayPublisher

    shell = get_ipython()
    publisher = CapturingDisplayPublisher()
    old_publisher, shell.display_pub = shell.display_pub, publisher
    error = None
    try:
        with _text_goes_to(output):
            try:
                _execute(shell, source, name)
            except BaseException as failure:  # SystemExit and KeyboardInterrupt end a cell too
                error = _describe(failure, name)
            # What the failed functions held, such as a store with its port, is free again.
            gc.collect()
    finally:
        shell.display_pub = old_publisher
    displays = [(one["data"], one["metadata"]) for one in publisher.outputs]
    return {"error": error, "displays": displays}


def read_variable(name: str) -> dict[str, Any]:
    """Return {"value": ...} of a variable of the cells, or {} when there is none of that name."""
    from IPython import get_ipython

    namespace = get_ipython().user_ns
    return {"value": namespace[name]} if name in namespace else {}


def set_variables(values: dict[str, Any]) -> None:
    """Give the cells' variables these values."""
    from IPython import get_ipython

    get_ipython().user_ns.update(values)


def _writer(descriptor: int) -> io.TextIOWrapper:
    """Return a text file that writes each line at once to whatever the descriptor leads to."""
    raw = io.FileIO(descriptor, "w", closefd=False)
    return io.TextIOWrapper(
        io.BufferedWriter(raw), encoding="utf-8", errors="replace", line_buffering=True
    )


def _execute(shell: Any, source: str, name: str) -> None:
    # Magics and !commands become Python. Empty lines at the start are dropped, so put them back.
    empty = next((i for i, line in enumerate(source.splitlines()) if line.strip()), 0)
    code = "\n" * empty + shell.transform_cell(source)
    # For tracebacks and inspect.getsource; no modification time, so that it is never dropped.
    linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
    tree = ast.parse(code, name)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    shell.events.trigger("pre_execute")
    try:
        exec(compile(tree, name, "exec"), shell.user_ns)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), name, "eval"), shell.user_ns)
            if value is not None and not source.rstrip().endswith(";"):
                _show(shell, value)
    finally:
        shell.events.trigger("post_execute")  # matplotlib shows its open figures here


def _show(shell: Any, value: Any) -> None:
    """Print a cell's last expression; display it when it has more to show than text."""
    data, metadata = shell.display_formatter.format(value)
    if set(data) == {"text/plain"}:
        print(data["text/plain"])
    else:
        shell.display_pub.publish(data, metadata)


def _describe(failure: BaseException, name: str) -> dict[str, Any]:
    """Return the error as plain data: the notebook may not know its class."""
    stack = traceback.extract_tb(failure.__traceback__)
    frames = [(frame.filename, frame.lineno, frame.name) for frame in stack]
    # An error of this package says itself what is wrong: then only the way to it counts.
    package = Path(__file__).parents[1]
    own = type(failure).__module__.startswith(f"{package.name}.")
    hidden = str(package) if own else __file__
    frames = [frame for frame in frames if not frame[0].startswith(hidden)]
    if isinstance(failure, SyntaxError) and failure.filename == name:
        frames = [(name, failure.lineno, "<module>")]
    return {
        "type": type(failure).__name__,
        "message": str(failure.msg if isinstance(failure, SyntaxError) else failure),
        "frames": frames,
        "traceback": "".join(traceback.format_exception(failure)),
        "time": time.time(),
    }


@contextlib.contextmanager
def _text_goes_to(path: str) -> Iterator[None]:
    """Send everything this process writes to file descriptors 1 and 2 to path."""
    kept = [(number, os.dup(number)) for number in (1, 2)]
    with open(path, "wb") as file:
        for number, _ in kept:
            os.dup2(file.fileno(), number)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, copy in kept:
            os.dup2(copy, number)
            os.close(copy)
