"""Images for a training run: real, downloaded once, or made up; and loaders that share them out.

Copy with fetch.py.

    train_set, test_set = load("digits")
    train = train_loader(train_set, 32, rank, world_size, seed)    # DistributedSampler
    test = evaluation_loader(test_set, 32, rank, world_size)       # every image exactly once

Nothing here needs a process group: rank and world size are arguments.
Lesson: notebooks/04_resnet_ddp.ipynb
"""

from __future__ import annotations

import shutil
import socket
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    StackDataset,
    Subset,
    TensorDataset,
)

try:
    from .fetch import DataNotAvailable, fetch_once
except ImportError:  # copied next to a script
    from fetch import DataNotAvailable, fetch_once

NAMES = ("digits", "cifar10", "synthetic")


def load(
    name: str,
    image_size: int = 32,
    root: str | Path = "data",
    local_rank: int = 0,
    timeout_s: float = 600.0,
    synthetic_images: int = 512,
) -> tuple[Dataset, Dataset]:
    """Return the (train, test) sets of name, with images (3, image_size, image_size), labels 0-9.

    "digits": 1797 real handwritten digits that scikit-learn ships, 1437 to train on.
    "cifar10": 60000 photographs through torchvision, read from root or downloaded to it by
    local rank 0 of each node while the others wait, at most timeout_s seconds.
    "synthetic": synthetic_images of noise, and a quarter as many to test on, for speed runs.
    Raises DataNotAvailable.
    """
    if name == "digits":
        return _digits(image_size)
    if name == "cifar10":
        return _cifar10(image_size, Path(root), local_rank, timeout_s)
    if name == "synthetic":
        train = _synthetic(synthetic_images, image_size, seed=0)
        return train, _synthetic(synthetic_images // 4, image_size, seed=1)
    raise DataNotAvailable(f"data {name!r}, expected one of {', '.join(NAMES)}.")


def train_loader(
    dataset: Dataset,
    batch_size: int,
    rank: int,
    world_size: int,
    seed: int = 0,
    drop_last: bool = False,
    num_workers: int = 0,
) -> DataLoader:
    """Return a loader of this rank's share of dataset in a new order for each set_epoch(epoch).

    All ranks get equally many images: where dataset does not divide, a few come twice.
    batch_size counts one rank's images.
    """
    sampler = DistributedSampler(dataset, world_size, rank, seed=seed)
    options = {"sampler": sampler, "drop_last": drop_last, "generator": torch.Generator()}
    return _loader(dataset, batch_size, num_workers, **options)


def evaluation_loader(
    dataset: Dataset, batch_size: int, rank: int, world_size: int, num_workers: int = 0
) -> DataLoader:
    """Return a loader of images rank, rank + world_size, ...: over all ranks, each exactly once.

    Ranks may get different numbers of batches, also none: evaluate without DDP.forward.
    """
    mine = Subset(dataset, range(rank, len(dataset), world_size))
    return _loader(mine, batch_size, num_workers)


def _loader(dataset: Dataset, batch_size: int, num_workers: int, **options) -> DataLoader:
    return DataLoader(
        dataset,
        batch_size,
        num_workers=num_workers,
        pin_memory=torch.cuda.is_available(),
        **options,
    )


def _digits(image_size: int) -> tuple[Dataset, Dataset]:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise DataNotAvailable("digits come with scikit-learn: pip install scikit-learn") from error
    digits = load_digits()
    images = torch.as_tensor(digits.images, dtype=torch.float32)[:, None] / 16  # (1797, 1, 8, 8)
    images = F.interpolate(images, (image_size, image_size), mode="bilinear", align_corners=False)
    images = (images - 0.305) / 0.376
    labels = torch.as_tensor(digits.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    # expand: three channels that are one in memory
    train, test = (
        TensorDataset(images[part].expand(-1, 3, -1, -1), labels[part])
        for part in (order[:1437], order[1437:])
    )
    return train, test


def _synthetic(images: int, image_size: int, seed: int) -> Dataset:
    """Return noise with random labels, the same in every process; only 64 images are stored.

    Random labels, not constant ones: with those the loss falls to 0, gradients become denormal
    numbers, and a CPU trains many times slower than on real data.
    """
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(min(images, 64), 3, image_size, image_size, generator=generator)
    labels = torch.randint(10, (images,), generator=generator)
    return StackDataset(Subset(noise, [i % len(noise) for i in range(images)]), labels)


def _cifar10(
    image_size: int, root: Path, local_rank: int, timeout_s: float
) -> tuple[Dataset, Dataset]:
    try:
        from torchvision import transforms
        from torchvision.datasets import CIFAR10
    except ImportError as error:
        raise DataNotAvailable("cifar10 needs torchvision: pip install torchvision") from error

    def fetch(folder: Path) -> None:
        archive = root / CIFAR10.filename
        if archive.exists():
            shutil.copy(archive, folder)
        before = socket.getdefaulttimeout()
        socket.setdefaulttimeout(5)  # torchvision sets none: a dead network would take minutes
        try:
            CIFAR10(folder, download=True)
        finally:
            socket.setdefaulttimeout(before)

    final = root / CIFAR10.base_folder
    hint = (
        f"Copy {CIFAR10.filename} to {root.absolute()} from a machine with network,"
        " or train on --data digits."
    )
    fetch_once(final, fetch, local_rank, timeout_s, hint)
    crop_and_flip = [transforms.RandomCrop(32, padding=4), transforms.RandomHorizontalFlip()]
    to_tensor = [
        *([] if image_size == 32 else [transforms.Resize((image_size, image_size))]),
        transforms.ToTensor(),
        transforms.Normalize((0.491, 0.482, 0.447), (0.247, 0.243, 0.262)),
    ]
    try:
        return (
            CIFAR10(root, train=True, transform=transforms.Compose(crop_and_flip + to_tensor)),
            CIFAR10(root, train=False, transform=transforms.Compose(to_tensor)),
        )
    except (RuntimeError, OSError) as error:
        raise DataNotAvailable(
            f"{final.absolute()} does not hold all of CIFAR-10: {error}\n"
            f"Remove it and start again: rm -r {final.absolute()}"
        ) from error
