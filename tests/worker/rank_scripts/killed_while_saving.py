"""What test_rotation.py starts: killed_while_saving.py FOLDER KILLS SEED.

A run that saves after every step is killed with SIGKILL after a random time, resumed by the next
process, killed again. Processes are forked: importing torch for each would take minutes.
"""

import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from ddp_helpers.worker.checkpoint import read
from ddp_helpers.worker.checks import parameters_hash
from ddp_helpers.worker.rotation import found, load_newest, save_next

KEEP = 2


def train(folder: Path | None, steps: int) -> str:
    """Train to steps, from where folder says; return the hash of the parameters."""
    torch.manual_seed(0)
    model = torch.nn.Linear(256, 256)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9)
    step = 0
    if folder and (position := load_newest(folder, model, optimizer, say=lambda line: None)):
        step = position.step
    while step < steps:
        model(torch.randn(2, 256)).square().mean().backward()  # other images after each step
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if folder:
            save_next(folder, KEEP, model, optimizer, epoch=0, step=step)
    return parameters_hash(model)


def in_child(function) -> int:
    child = os.fork()
    if child == 0:
        status = 1
        try:
            function()
            status = 0
        finally:
            os._exit(status)
    return child


def main(folder: Path, kills: int, seed: int) -> None:
    torch.set_num_threads(1)  # a forked process has no threads but its first
    train(None, 1)  # torch imports more when an optimizer is first used
    waits = random.Random(seed)
    newest = half_written = 0
    for _ in range(kills):
        child = in_child(lambda: train(folder, 10**6))
        time.sleep(waits.uniform(0.005, 0.06))
        os.kill(child, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert status == -signal.SIGKILL, status
        files = found(folder)
        for path in files:
            read(path)
        reached = read(files[0])["step"] if files else 0
        assert reached >= newest, (reached, newest)
        newest = reached
        half_written += any(folder.glob(".*.tmp"))
    steps = newest + 3
    resumed = in_child(lambda: print(train(folder, steps), flush=True))
    assert os.waitpid(resumed, 0)[1] == 0
    print(train(None, steps))
    print(f"seed {seed}: {newest} steps in all, {half_written} kills left half a file")
    assert newest > kills // 2
    assert half_written
    assert len(found(folder)) == KEEP
    assert not any(folder.glob(".*.tmp"))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
