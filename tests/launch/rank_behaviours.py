"""What a rank does in a test of the runner. Standard library only, so that it starts at once.

python rank_behaviours.py BEHAVIOUR FOLDER
"""

import json
import os
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path

RANK = int(os.environ.get("RANK") or os.environ.get("OMPI_COMM_WORLD_RANK") or 0)
SIZE = int(os.environ.get("WORLD_SIZE") or os.environ.get("OMPI_COMM_WORLD_SIZE") or 1)

arguments = [word for word in sys.argv[1:] if not word.startswith("--local-rank")]
behaviour, folder = arguments[0], Path(arguments[1])


def say(text):
    os.write(1, f"[rank {RANK}] {text}\n".encode())


def here(name="here"):
    (folder / f"{name}_{RANK}").touch()


def wait_for_all(name="here"):
    here(name)
    while len(list(folder.glob(f"{name}_*"))) < SIZE:
        time.sleep(0.01)


def forever():
    time.sleep(600)


def write_slowly(text):
    """Write text to stderr in pieces, as Python does, and let the other ranks come between."""
    for line in text.splitlines(keepends=True):
        os.write(2, line[:5].encode())
        os.write(2, line[5:].encode())
        time.sleep(0.02)


def lose_connection():
    raise RuntimeError("[gloo/transport/tcp/pair.cc:525] Connection closed by peer")


def fail():
    raise ValueError("deliberate")


def print_lines():
    # mpirun itself waits for whoever holds a rank's output.
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    subprocess.Popen(["sleep", "600"], start_new_session=True, **silent)
    for number in range(50):
        say(f"line {number}")


def say_here():
    say(f"on {os.uname().nodename}")


def fail_while_others_are_blocked():
    wait_for_all()
    if RANK == 1:
        fail()
    forever()


def fail_while_others_fail_too():
    # All tracebacks are on their way at the same time, and rank 1 is the last to begin.
    sys.excepthook = lambda *error: write_slowly("".join(traceback.format_exception(*error)))
    wait_for_all()
    if RANK == 1:
        while len(list(folder.glob("failing_*"))) < SIZE - 1:
            time.sleep(0.01)
        sys.excepthook(*_caught(fail))
    else:
        here("failing")
        sys.excepthook(*_caught(lose_connection))
    wait_for_all("wrote")  # only now may the launcher see the first of them end
    sys.exit(1)


def _caught(function):
    try:
        function()
    except Exception:
        return sys.exc_info()


def exit_with_3():
    wait_for_all()
    if RANK == 1:
        say("last words")
        sys.exit(3)
    forever()


def be_killed():
    wait_for_all()
    if RANK == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    forever()


def wait():
    say("waiting")
    wait_for_all()
    forever()


def wait_and_one_ignores_sigterm():
    if RANK == 1:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    wait()


def write_result():
    """python rank_behaviours.py write_result FOLDER --result_dir DIR"""
    where = Path(arguments[arguments.index("--result_dir") + 1])
    names = ["RANK", "OMPI_COMM_WORLD_RANK", "MASTER_PORT", "OMP_NUM_THREADS", "OUTER"]
    seen = {name: os.environ.get(name) for name in names}
    text = json.dumps({"rank": RANK, "world_size": SIZE, "seen": seen})
    (where / f"rank_{RANK}.json").write_text(text)


(folder / f"pid_{os.getpid()}").touch()
globals()[behaviour]()
