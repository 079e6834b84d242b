"""A signal to some ranks, and where all of them stop."""

import os
import random
import signal
import time

import torch
import torch.distributed as dist

from ddp_helpers.worker.stop import stop_notice

CPU = torch.device("cpu")


def steps_until_stop(rank, signalled, at_step):
    """Return the number of steps this rank does when those in signalled get SIGTERM."""
    waits = random.Random(rank)
    with stop_notice(CPU) as stop_now:
        for step in range(1, 20):
            time.sleep(waits.uniform(0, 0.01))  # ranks come at different times
            if rank in signalled and step == at_step + rank % 2:
                os.kill(os.getpid(), signal.SIGTERM)
            dist.all_reduce(torch.ones(1))
            if stop_now():
                return step
    return None


def one_is_told(rank, world_size, folder):
    return steps_until_stop(rank, {world_size - 1}, 5)


def all_are_told(rank, world_size, folder):
    return steps_until_stop(rank, range(world_size), 5)


def none_is_told(rank, world_size, folder):
    return steps_until_stop(rank, (), 5)


WORLDS = {one_is_told: (1, 2, 4), all_are_told: (1, 2, 4), none_is_told: (2,)}
