"""Clean up also when this process is killed, and runs no cleanup of its own.

Lesson: notebooks/08_when_it_hangs.ipynb
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def guarded(module: str, *args: str) -> Iterator[None]:
    """Keep `python -m module args` waiting for the end of its stdin, for the with block's length.

    The system closes the pipe however this process ends. When the block ends, the guard is ended
    before it can act.
    """
    guard = subprocess.Popen(
        [sys.executable, "-m", module, *args],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield
    finally:
        guard.kill()
        guard.wait()
        guard.stdin.close()
