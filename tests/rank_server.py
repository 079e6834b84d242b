"""A Python that has imported torch and forks a rank for each request: no test waits for imports.

The fixtures of tests/conftest.py start it, here or on a node of a practice cluster. A request is a
line of JSON on its input: script, args, environ (all of it), cwd, and output, a file NAME.log. The
rank's process number goes to NAME.pid and, when it has ended, its exit status and seconds to
NAME.ended. The server prints "ready" first, and ends when its input does.
"""

import gc
import json
import os
import runpy
import signal
import sys
import time
from pathlib import Path

import sklearn.datasets  # noqa: F401
import torch._dynamo  # noqa: F401 - what DDP and every optimizer import when first used
import torchvision  # noqa: F401


def next_rank() -> dict:
    """Return the request this process is the rank of: returns in ranks only."""
    for line in sys.stdin:
        # Two forks: the server goes on to the next request, its child waits for the rank.
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            request = json.loads(line)
            output = Path(request["output"])
            began = time.monotonic()
            if (rank := os.fork()) == 0:
                return request
            output.with_suffix(".pid").write_text(f"{rank}")
            status = os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1])
            ended = output.with_suffix(".part")
            ended.write_text(f"{status} {time.monotonic() - began}")
            ended.rename(output.with_suffix(".ended"))
            os._exit(0)
    sys.exit()


# A rank that ends would otherwise copy all these objects to look for garbage among them.
gc.collect()
gc.freeze()
print("ready", flush=True)
signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # those who wait for a rank are not waited for
rank = next_rank()
output = os.open(rank["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
for stream, file in ((0, os.open(os.devnull, os.O_RDONLY)), (1, output), (2, output)):
    os.dup2(file, stream)
os.chdir(rank["cwd"])
os.environ.clear()
os.environ.update(rank["environ"])
sys.argv = [rank["script"], *rank["args"]]
sys.path[0] = str(Path(rank["script"]).parent)
runpy.run_path(rank["script"], run_name="__main__")
