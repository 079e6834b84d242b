"""One epoch of DDP training, and an evaluation that sees every image exactly once.

Copy with checks.py and metrics.py.

    model = wrap(model, device)  # of replica.py, or DDP(model, ...)
    for epoch in range(epochs):
        result = train_one_epoch(model, train_loader, optimizer, device, epoch)
        accuracy = evaluate(model, test_loader, device)

The same calls work on CPU and GPU, and in one process without DDP and without a process group.
Lesson: notebooks/04_resnet_ddp.ipynb
"""

from __future__ import annotations

import contextlib
import random
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader

try:
    from .checks import check_all_parameters_used, check_equal_lengths
    from .metrics import all_sum, mean
except ImportError:  # copied next to a script
    from checks import check_all_parameters_used, check_equal_lengths
    from metrics import all_sum, mean

_AMP_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class EpochResult:
    """What one epoch gave, over the images of all ranks."""

    loss: float
    accuracy: float  # fraction, while the parameters were still changing
    images_per_s: float


@dataclass(frozen=True)
class Progress:
    """How far into an epoch this rank is; a checkpoint can carry it."""

    step: int = 0  # finished steps
    totals: Sequence[float] = (0.0, 0.0, 0.0)  # loss, correct, images of this rank in them
    seconds: float = 0.0


def train_one_epoch(
    model: nn.Module,
    loader: DataLoader,
    optimizer: torch.optim.Optimizer,
    device: torch.device,
    epoch: int,
    *,
    scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
    scaler: torch.amp.GradScaler | None = None,
    amp: str | None = None,
    accumulate: int = 1,
    progress: Callable[[Iterable], Iterable] = iter,
    begin: Progress | None = None,
    after_step: Callable[[int, Callable[[], Progress]], None] | None = None,
) -> EpochResult:
    """Train on every batch of loader and return the result over all ranks; each must call it.

    accumulate batches make one step, as if they were one batch; the last step of an epoch may
    have fewer. amp is "bf16", "fp16" (with a scaler) or None. scheduler steps after each step.
    begin continues an epoch that was left, its figures included; the batches before are read but
    not trained on. after_step(step, progress) is called after each; progress() gives a Progress.
    Raises TrainingError, on every rank, for what would make DDP wait for ever.
    """
    check_equal_lengths(loader)
    set_epoch(loader, epoch)
    model.train()
    scaler = scaler or torch.amp.GradScaler(device.type, enabled=False)
    begin = begin or Progress()
    totals = torch.tensor(begin.totals, dtype=torch.float64, device=device)
    batches = _without_first(begin.step * accumulate, progress, loader)
    start = time.perf_counter() - begin.seconds
    for step, group in enumerate(_groups(batches, accumulate), begin.step + 1):
        totals += _backward(model, group, device, scaler, amp, check=step == begin.step + 1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if scheduler:
            scheduler.step()
        if after_step:
            seconds = time.perf_counter() - start
            after_step(step, partial(_progress, step, totals, seconds))
    # all_sum waits for the other ranks and tolist for the device: the clock stops after both.
    loss, correct, images = all_sum(totals).tolist()
    seconds = time.perf_counter() - start
    return EpochResult(mean(loss, images), mean(correct, images), images / seconds)


def rehearse(
    model: nn.Module, loader: DataLoader, device: torch.device, amp: str | None = None
) -> None:
    """Run one backward of a DDP model and undo what it changed, before a run starts or resumes.

    DDP exchanges the gradients of its first backward in one piece and decides then on the pieces
    of all others. With three ranks or more, other pieces are summed in another order: without
    this, the first step after a resume would differ in the last bits from the step it repeats.
    """
    buffers = [buffer.clone() for buffer in model.buffers()]
    with _random_numbers_kept(device):
        image, _ = loader.dataset[0]
        # As many as in training: torch.compile would compile for another number.
        count = min(loader.batch_size, len(loader.sampler))
        images, labels = torch.zeros(count, *image.shape), torch.zeros(count, dtype=torch.long)
        model.train()
        loss, _, _ = forward(model, (images, labels), device, amp)
        check_all_parameters_used(model, loss)
        (loss / count).backward()
    model.zero_grad()
    with torch.no_grad():
        for buffer, before in zip(model.buffers(), buffers, strict=True):
            buffer.copy_(before)


@torch.no_grad()
def evaluate(
    model: nn.Module, loader: DataLoader, device: torch.device, *, amp: str | None = None
) -> float:
    """Return the fraction of correct predictions over all ranks' images, in [0, 1].

    Every rank must call it. The ranks may hold different numbers of batches, also none.
    """
    # DDP.forward talks to the other ranks and would wait for those with fewer batches.
    inner = model.module if isinstance(model, DDP) else model
    _copy_buffers_of_rank_0(inner)
    was_training = inner.training
    inner.eval()
    totals = torch.zeros(3, dtype=torch.float64, device=device)  # loss, correct, images
    for batch in loader:
        totals += _totals(*forward(inner, batch, device, amp))
    inner.train(was_training)
    _, correct, images = all_sum(totals).tolist()
    return mean(correct, images)


def set_epoch(loader: DataLoader, epoch: int) -> None:
    """Tell a DistributedSampler the epoch: without it, every epoch has the same order.

    Warns, once per sampler, when the same epoch comes twice in a row.
    """
    sampler = getattr(loader, "sampler", None)
    if not hasattr(sampler, "set_epoch"):
        return
    sampler.set_epoch(epoch)
    before = getattr(sampler, "epoch_trained_before", None)  # kept where it is forgotten in time
    if before == epoch:
        warnings.warn(
            f"epoch is {epoch} for the second time: DistributedSampler gives the same order again."
            " Pass the number of the epoch.",
            stacklevel=3,
        )
    sampler.epoch_trained_before = "warned" if before in (epoch, "warned") else epoch
    if loader.generator is not None:  # what worker processes draw from, the same after a resume
        seed = (sampler.seed * 1_000_003 + epoch) * sampler.num_replicas + sampler.rank
        loader.generator.manual_seed(seed)


def _without_first(
    count: int, progress: Callable[[Iterable], Iterable], loader: DataLoader
) -> Iterator:
    """Return the batches of loader after the first count.

    Those are read all the same: what augments them draws random numbers, in worker processes too,
    and must stand where it stood.
    """
    if not count:
        return iter(progress(loader))
    with _random_numbers_kept():
        batches = iter(progress(loader))
        for _ in islice(batches, count):
            pass
    return batches


@contextlib.contextmanager
def _random_numbers_kept(device: torch.device | None = None) -> Iterator[None]:
    """Give back the random numbers drawn in the with block, also device's when it is a GPU."""
    python = random.getstate()
    with torch.random.fork_rng([device] if device and device.type == "cuda" else []):
        yield
    random.setstate(python)


def _progress(step: int, totals: torch.Tensor, seconds: float) -> Progress:
    return Progress(step, totals.tolist(), seconds)  # tolist waits for the device: only when asked


def _groups(batches: Iterable, size: int) -> Iterator[list]:
    """Yield the batches in lists of size; the last list may be shorter."""
    iterator = iter(batches)
    while group := list(islice(iterator, size)):
        yield group


def _backward(model, batches, device, scaler, amp, check) -> torch.Tensor:
    """Add the gradient of the mean loss over the images of batches; return their totals."""
    images = sum(len(labels) for _, labels in batches)
    totals = 0
    for number, batch in enumerate(batches, 1):
        # Ranks exchange gradients in the last backward only; no_sync keeps the others at home.
        exchange = number == len(batches) or not isinstance(model, DDP)
        with contextlib.nullcontext() if exchange else model.no_sync():
            loss, correct, count = forward(model, batch, device, amp)
            if check and number == 1:
                check_all_parameters_used(model, loss)
            scaler.scale(loss / images).backward()
        totals += _totals(loss, correct, count)
    return totals


def forward(
    model: nn.Module, batch: Sequence[torch.Tensor], device: torch.device, amp: str | None = None
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return the loss summed over the batch, the number of correct predictions, of images."""
    images, labels = (tensor.to(device, non_blocking=True) for tensor in batch)
    with torch.autocast(device.type, _AMP_DTYPES.get(amp), enabled=amp is not None):
        scores = model(images)  # (images, classes)
        loss = F.cross_entropy(scores, labels, reduction="sum")
    return loss, (scores.argmax(1) == labels).sum(), len(labels)


def _totals(loss: torch.Tensor, correct: torch.Tensor, count: int) -> torch.Tensor:
    images = torch.full_like(loss, count, dtype=torch.float64)  # no copy from host to device
    return torch.stack([loss.detach().double(), correct.double(), images])


def _copy_buffers_of_rank_0(model: nn.Module) -> None:
    """Give every rank rank 0's buffers: BatchNorm's running statistics differ between ranks."""
    if dist.is_initialized():
        for buffer in model.buffers():
            dist.broadcast(buffer, src=0)
