"""Training on N ranks, beside the same on one."""

import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from ddp_helpers.worker.checks import parameters_hash
from ddp_helpers.worker.data import evaluation_loader, train_loader
from ddp_helpers.worker.replica import set_seed, wrap
from ddp_helpers.worker.training import evaluate, train_one_epoch

CPU = torch.device("cpu")


def data_of(count):
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(count, 3, 4, 4, generator=generator, dtype=torch.float64)
    return TensorDataset(images, torch.randint(10, (count,), generator=generator))


def convolutions():
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(16, 10)]
    return nn.Sequential(*layers).double()


class Recorder(torch.optim.SGD):
    """SGD that keeps the gradients of each step."""

    def step(self, closure=None):
        group = self.param_groups[0]["params"]
        self.seen = [*getattr(self, "seen", []), [p.grad.clone() for p in group]]
        return super().step(closure)


def on_one_process(dataset, loaders, accumulate):
    """Return the gradients of each step of plain training on what all ranks' loaders give."""
    model = convolutions()
    optimizer = Recorder(model.parameters(), 0.1)
    batches = list(zip(*loaders, strict=True))  # one batch of each rank
    for first in range(0, len(batches), accumulate):
        parts = [part for step in batches[first : first + accumulate] for part in step]
        images, labels = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer.seen


def largest_difference(accumulate, rank, world_size):
    # 9 batches per rank, the last one shorter: with accumulate 4 the last step has one batch.
    dataset = data_of(25 * world_size)
    model = wrap(convolutions(), CPU)
    optimizer = Recorder(model.parameters(), 0.1)
    loader = train_loader(dataset, 3, rank, world_size)
    train_one_epoch(model, loader, optimizer, CPU, epoch=1, accumulate=accumulate)
    loaders = [train_loader(dataset, 3, other, world_size) for other in range(world_size)]
    for other in loaders:
        other.sampler.set_epoch(1)
    expected = on_one_process(dataset, loaders, accumulate)
    assert len(expected) == len(optimizer.seen) == -(-9 // accumulate)
    pairs = zip(optimizer.seen, expected, strict=True)
    return max((a - b).abs().max().item() for s, e in pairs for a, b in zip(s, e, strict=True))


def gradients(rank, world_size, folder):
    return largest_difference(1, rank, world_size)


def accumulated_gradients(rank, world_size, folder):
    return largest_difference(4, rank, world_size)


def exact_accuracy(rank, world_size, folder):
    """Return the accuracy for 3 and 5 images, and what one process finds with rank 0's buffers."""

    def model(shift):
        torch.manual_seed(0)
        made = nn.Sequential(nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(48, 2)).double()
        made[0].running_mean += shift
        return made

    dataset = data_of(5)
    with torch.no_grad():
        dataset.tensors[1].copy_(model(0).eval()(dataset.tensors[0]).argmax(1))
        dataset.tensors[1][2] = 1 - dataset.tensors[1][2]  # number 2 is wrong: 2/3, 4/5
    wrapped = wrap(model(0), CPU)
    wrapped.module[0].running_mean += 100 * rank  # only rank 0's are right
    found = []
    for count in (3, 5):
        loader = evaluation_loader(Subset(dataset, range(count)), 2, rank, world_size)
        found.append(evaluate(wrapped, loader, CPU))
    return {"found": found, "still training": wrapped.module.training}


def uneven_loaders(rank, world_size, folder):
    loader = DataLoader(data_of(6 - 2 * rank), 2)
    model = wrap(convolutions(), CPU)
    began = time.monotonic()
    try:
        train_one_epoch(model, loader, torch.optim.SGD(model.parameters(), 0.1), CPU, epoch=0)
    except Exception as error:
        return {"error": str(error), "seconds": time.monotonic() - began}


def figures_over_all_ranks(rank, world_size, folder):
    """Rank r's labels are all r and the model says 0, so 1 in world_size is correct."""
    images = torch.zeros(4, 3, 4, 4, dtype=torch.float64)
    loader = DataLoader(TensorDataset(images, torch.full((4,), rank)), 2)
    model = convolutions()
    with torch.no_grad():
        model[3].bias[0] += 100
    model = wrap(model, CPU)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    began = time.perf_counter()
    result = train_one_epoch(model, loader, optimizer, CPU, epoch=0)
    seconds = time.perf_counter() - began
    return {
        "accuracy": result.accuracy,
        "loss": result.loss,
        "images": result.images_per_s * seconds,
    }


def replicas_after_different_seeds(rank, world_size, folder):
    set_seed(5, rank)
    random_number = torch.rand(()).item()
    model = wrap(nn.Linear(2, 2), CPU)
    return [random_number, parameters_hash(model)]


WORLDS = {
    gradients: (1, 2, 4),
    accumulated_gradients: (1, 2, 4),
    exact_accuracy: (1, 2, 3, 4),
    uneven_loaders: (2,),
    figures_over_all_ranks: (2,),
    replicas_after_different_seeds: (2,),
}
