"""A loop of all-reduces, in which one rank meets a fault at one step.

python faulty_rank.py FAULT RANK STEP
"""

import os
import signal
import sys

import torch
import torch.distributed as dist

from ddp_helpers.worker.console import short_errors
from ddp_helpers.worker.environment import detect
from ddp_helpers.worker.process_group import process_group
from ddp_helpers.worker.rendezvous import RendezvousError
from ddp_helpers.worker.watchdog import PeerFailed, watchdog

STEPS = 6
fault, rank, at = [word for word in sys.argv[1:] if not word.startswith("--local-rank")]
env = detect()
with (
    short_errors(PeerFailed, RendezvousError),
    process_group(env, "gloo", timeout_s=8),
    watchdog(env.rank, env.world_size, after_s=2),
):
    for step in range(STEPS):
        if (env.rank, step) == (int(rank), int(at)):
            if fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            elif fault == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            elif fault == "raise":
                raise ValueError("boom")
            elif fault == "exit":
                sys.exit(0)
            elif fault == "skip":
                continue
        dist.all_reduce(torch.ones(1))
