"""A replica that trains step by step, so that a bench can time it: train_resnet's own parts.

    runner = Runner(args, rank, ranks, device, group)
    images = runner.step()                                    # of this rank
    images = runner.step(mark=clock.mark, exchange=False)     # with times, and without exchange

Lesson: notebooks/07_scaling.ipynb
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torchvision.models import get_model

from ddp_helpers.scripts import train_resnet
from ddp_helpers.worker.environment import LaunchEnvironment
from ddp_helpers.worker.replica import place, set_seed, wrap
from ddp_helpers.worker.training import forward, set_epoch


class Runner:
    """The replica of one rank of the first `ranks`: DDP, and plain where ranks is 1."""

    def __init__(
        self,
        args: argparse.Namespace,
        env: LaunchEnvironment,
        ranks: int,
        device: torch.device,
        group: dist.ProcessGroup | None,
    ):
        self.args, self.ranks, self.device = args, ranks, device
        set_seed(args.seed, env.rank)
        options = train_resnet.replica_options(args)
        model = get_model(args.arch, num_classes=10)
        if ranks > 1:
            self.model = wrap(model, device, **options, group=group)
        else:
            kept = {name: options[name] for name in ("channels_last", "compile")}
            self.model = place(model, device, **kept)
        self.optimizer = train_resnet.build_optimizer(args, self.model)
        self.scaler = torch.amp.GradScaler(device.type, enabled=args.amp == "fp16")
        # Each number of ranks shares the images out anew, as a run of that many would.
        self._loader, _ = train_resnet.build_loaders(args, replace(env, world_size=ranks), device)
        self.batches = self._forever()
        self.model.train()

    def _forever(self) -> Iterator:
        epoch = 0
        while True:
            set_epoch(self._loader, epoch)
            full = (batch for batch in self._loader if len(batch[1]) == self.args.batch_size)
            yield from full  # a short last batch would be a step of another size
            epoch += 1

    def step(self, mark: Callable[[str], None] = lambda what: None, exchange: bool = True) -> int:
        """Do one optimizer step and return this rank's images in it; mark is told each part's end.

        Without exchange the gradients stay at home, and replicas differ from then on.
        """
        batches = [next(self.batches) for _ in range(self.args.accumulate)]
        mark("data")
        images = sum(len(labels) for _, labels in batches)
        for number, batch in enumerate(batches, 1):
            with self._exchange(exchange and number == len(batches)):
                loss, _, _ = forward(self.model, batch, self.device, self.args.amp)
                mark("forward")
                self.scaler.scale(loss / images).backward()
                mark("backward")
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        mark("optimizer")
        return images

    def _exchange(self, yes: bool) -> contextlib.AbstractContextManager:
        if yes or not isinstance(self.model, DDP):
            return contextlib.nullcontext()
        return self.model.no_sync()


class Clock:
    """Adds up the seconds of a step's parts, as the device has done them."""

    def __init__(self, device: torch.device):
        self._device = device
        self.seconds: dict[str, float] = {}
        self._last = now(device)

    def mark(self, what: str) -> float:
        """Count the time since the last mark as what, and return the time."""
        last, self._last = self._last, now(self._device)
        self.seconds[what] = self.seconds.get(what, 0.0) + self._last - last
        return self._last


def now(device: torch.device) -> float:
    """Return the time in seconds at which device has done all it was asked to."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
