"""Saving and resuming on several ranks."""

import contextlib
import dataclasses
import hashlib
import os
import random

import torch
from torch import nn

from ddp_helpers.worker.checkpoint import load, save
from ddp_helpers.worker.checks import parameters_hash
from ddp_helpers.worker.data import train_loader
from ddp_helpers.worker.replica import set_seed, wrap
from ddp_helpers.worker.training import Progress, rehearse, train_one_epoch

CPU = torch.device("cpu")


class Noisy(nn.Module):
    """Uses every kind of state: buffers, torch's random numbers and Python's."""

    def __init__(self):
        super().__init__()
        self.norm, self.last = nn.BatchNorm2d(3), nn.Linear(48, 10)

    def forward(self, x):
        x = nn.functional.dropout(self.norm(x), 0.5, training=self.training)
        return self.last(x.flatten(1) * (1 + random.random()))


class Run:
    """A training run with all that a checkpoint holds."""

    def __init__(self, rank, world_size, seed):
        set_seed(seed, rank)
        self.model = wrap(Noisy(), CPU)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, 0.5)
        images = torch.randn(24, 3, 4, 4, generator=torch.Generator().manual_seed(0))
        dataset = torch.utils.data.TensorDataset(images, torch.arange(24) % 10)
        self.loader = train_loader(dataset, 2, rank, world_size, seed=1)

    def state(self):
        return self.model, self.optimizer, self.scheduler

    def train(self, epochs):
        for epoch in epochs:
            options = {"scheduler": self.scheduler}
            train_one_epoch(self.model, self.loader, self.optimizer, CPU, epoch, **options)

    def bits(self):
        buffers = b"".join(b.numpy().tobytes() for b in self.model.buffers())
        return {
            "parameters": parameters_hash(self.model),
            "buffers": hashlib.sha256(buffers).hexdigest(),
            "lr": self.scheduler.get_last_lr(),
            "next random numbers": [random.random(), torch.rand(()).item()],
        }


def resumed_and_uninterrupted(rank, world_size, folder):
    path = folder / f"resume_{world_size}" / "checkpoint.pt"
    uninterrupted = Run(rank, world_size, seed=3)
    uninterrupted.train(range(4))
    expected = uninterrupted.bits()  # now: both runs draw from the same random numbers
    first = Run(rank, world_size, seed=3)
    first.train(range(2))
    save(path, *first.state(), epoch=2)
    second = Run(rank, world_size, seed=99)  # all that it starts with is replaced
    second.train(range(1))
    position = load(path, *second.state())
    second.train(range(position.epoch, 4))
    return [expected, second.bits()]


class Augmented(torch.utils.data.Dataset):
    """Other images in each epoch, by both kinds of random numbers."""

    def __len__(self):
        return 48

    def __getitem__(self, number):
        return torch.rand(3, 4, 4) + number / 48 + random.random(), number % 10


class Interrupted(Exception):
    """Training has stopped here."""


class LargeRun(Run):
    """Augments its images, and has more parameters than DDP exchanges in one piece."""

    def __init__(self, rank, world_size, seed, workers):
        super().__init__(rank, world_size, seed)
        model = self.model.module
        model.last = nn.Sequential(nn.Linear(48, 6000), nn.Linear(6000, 10))
        self.model = wrap(model, CPU)
        self.optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, 0.5)
        self.loader = train_loader(Augmented(), 2, rank, world_size, seed=1, num_workers=workers)
        rehearse(self.model, self.loader, CPU)

    def epoch(self, number, **options):
        options["scheduler"] = self.scheduler
        result = train_one_epoch(self.model, self.loader, self.optimizer, CPU, number, **options)
        return {**self.bits(), "loss": result.loss, "accuracy": result.accuracy}


def uninterrupted_and_resumed(rank, world_size, path, accumulate, workers):
    uninterrupted = LargeRun(rank, world_size, 3, workers)
    uninterrupted.epoch(0, accumulate=accumulate)
    expected = uninterrupted.epoch(1, accumulate=accumulate)
    first = LargeRun(rank, world_size, 3, workers)
    first.epoch(0, accumulate=accumulate)

    def interrupt(step, progress):
        save(path, *first.state(), epoch=1, step=step, mine=dataclasses.asdict(progress()))
        raise Interrupted

    with contextlib.suppress(Interrupted):
        first.epoch(1, accumulate=accumulate, after_step=interrupt)
    second = LargeRun(rank, world_size, 99, workers)  # all that it starts with is replaced
    position = load(path, *second.state())
    begin = Progress(**position.mine)
    return [expected, second.epoch(position.epoch, accumulate=accumulate, begin=begin)]


def resumed_within_an_epoch(rank, world_size, folder):
    return [
        uninterrupted_and_resumed(
            rank, world_size, folder / f"within_{ways}_{world_size}.pt", *ways
        )
        for ways in [(1, 0), (3, 0), (1, 2)]  # accumulate, worker processes
    ]


def on_other_ranks(rank, world_size, folder):
    """Save on as many ranks as there are, then load what one rank fewer or more has saved."""
    model = nn.Linear(2, 2)
    save(folder / f"of_{world_size}.pt", model, epoch=1, step=3, mine=rank)
    if world_size == 1:
        return None
    position = load(folder / f"of_{world_size - 1}.pt", model)
    return dataclasses.asdict(position)


def files_renamed_per_rank(rank, world_size, folder):
    path = folder / "renamed" / "checkpoint.pt"
    renamed = []
    real, os.replace = os.replace, lambda *paths: (renamed.append(paths), real(*paths))
    try:
        save(path, nn.Linear(2, 2), epoch=1)
    finally:
        os.replace = real
    assert path.exists()  # on every rank, when save has returned
    return len(renamed)


def damaged_for_rank_1_only(rank, world_size, folder):
    path = folder / f"damaged_{rank}.pt"
    save(folder / "good.pt", nn.Linear(2, 2))
    good = (folder / "good.pt").read_bytes()
    path.write_bytes(good[: len(good) // 2] if rank == 1 else good)
    load(path, nn.Linear(2, 2))


def unwritable(rank, world_size, folder):
    (folder / "a file").write_text("")
    save(folder / "a file" / "checkpoint.pt", nn.Linear(2, 2))


WORLDS = {
    resumed_and_uninterrupted: (1, 2),
    resumed_within_an_epoch: (1, 2, 4),
    on_other_ranks: (1, 2),
    files_renamed_per_rank: (2,),
    damaged_for_rank_1_only: (2,),
    unwritable: (2,),
}
