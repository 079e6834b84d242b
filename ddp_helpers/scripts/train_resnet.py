"""Train a ResNet on many processes, with one script for every launcher.

    python -m torch.distributed.run --nproc_per_node=2 -m ddp_helpers.scripts.train_resnet
    mpirun -np 2 python -m ddp_helpers.scripts.train_resnet --backend gloo --epochs 3
    python -m ddp_helpers.scripts.train_resnet --use_syn --arch resnet50 --image_size 64

--batch_size counts the images of one rank: a step uses world_size times as many.
Lesson: notebooks/04_resnet_ddp.ipynb
"""

import argparse
import logging
import math
from functools import partial
from pathlib import Path

import torch
from torchvision.models import get_model

from ddp_helpers.scripts.result_files import add_result_arguments, parse_args, write_results
from ddp_helpers.worker import checkpoint, data
from ddp_helpers.worker.checks import TrainingError, check_equal_replicas, parameters_hash
from ddp_helpers.worker.console import progress, rank_logger, short_errors
from ddp_helpers.worker.environment import (
    LaunchEnvironment,
    LaunchEnvironmentError,
    add_local_rank_argument,
    detect,
)
from ddp_helpers.worker.metrics import all_sum
from ddp_helpers.worker.process_group import process_group
from ddp_helpers.worker.rendezvous import RendezvousError
from ddp_helpers.worker.replica import set_seed, set_threads, wrap
from ddp_helpers.worker.training import evaluate, train_one_epoch

ERRORS = (
    LaunchEnvironmentError,
    RendezvousError,
    data.DataNotAvailable,
    checkpoint.CheckpointError,
    TrainingError,
)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser; an option with _ in its name may also be written with -."""
    parser = argparse.ArgumentParser(
        description="Train a ResNet with DistributedDataParallel.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )

    def add(name, **options):
        parser.add_argument(*dict.fromkeys([name, name.replace("_", "-")]), **options)

    archs = [f"resnet{layers}" for layers in (18, 34, 50, 101, 152)]
    add("--arch", choices=archs, default="resnet18", help="model of torchvision")
    add("--data", choices=data.NAMES, default="digits", help="what to train on")
    add("--use_syn", dest="data", action="store_const", const="synthetic", help="synthetic data")
    add("--data_dir", default="data", help="cifar10 is read from here, or downloaded to it")
    add("--epochs", type=int, default=5, help="passes over the data")
    add("--batch_size", type=int, default=32, help="images per rank and batch")
    add("--lr", type=float, default=0.02, help="learning rate at its highest")
    add("--image_size", type=int, default=32, help="height and width in pixels")
    add("--accumulate", type=int, default=1, help="batches per optimizer step")
    add("--amp", choices=["bf16", "fp16"], help="mixed precision")
    add("--compile", action="store_true", help="use torch.compile")
    add("--channels_last", action="store_true", help="keep the channels of a pixel together")
    add("--sync_bn", action="store_true", help="BatchNorm over all ranks' images (GPU only)")
    add("--save", metavar="DIR", help="write DIR/checkpoint.pt after each epoch")
    add("--resume", action="store_true", help="continue from --save DIR if a checkpoint is there")
    add("--seed", type=int, default=0, help="of initial parameters and the order of images")
    add("--backend", choices=["auto", "gloo", "nccl"], default="auto", help="auto: nccl on GPUs")
    add("--timeout", type=float, default=300.0, help="seconds to wait for a rank")
    add_result_arguments(parser)
    add_local_rank_argument(parser)
    return parser


def train(args: argparse.Namespace, env: LaunchEnvironment, device: torch.device) -> dict:
    """Train for args.epochs epochs and return the figures of the last one."""
    log = rank_logger(env.rank)
    set_seed(args.seed, env.rank)
    train_loader, test_loader = build_loaders(args, env, device)
    if args.batch_size > len(train_loader.sampler):
        log.info(
            f"--batch_size {args.batch_size}: a rank has only {len(train_loader.sampler)} images"
        )
    state = build_state(args, device, len(train_loader))
    model, optimizer, scheduler, scaler = state
    path = Path(args.save or "") / "checkpoint.pt"
    first_epoch = resume(path, state, device, log) if args.resume else 0
    options = {"scheduler": scheduler, "scaler": scaler, "amp": args.amp}
    options |= {"accumulate": args.accumulate, "progress": partial(progress, rank=env.rank)}

    accuracy, figures = None, {"loss": None, "images_per_s": None}
    for epoch in range(first_epoch, args.epochs):
        result = train_one_epoch(model, train_loader, optimizer, device, epoch, **options)
        accuracy = evaluate(model, test_loader, device, amp=args.amp)
        figures = {"loss": result.loss, "images_per_s": result.images_per_s}
        log.info(
            f"epoch {epoch + 1}/{args.epochs}  loss {result.loss:.4f}"
            f"  accuracy {result.accuracy:.4f}  test accuracy {accuracy:.4f}"
            f"  {result.images_per_s:.0f} images/s"
        )
        if args.save:
            checkpoint.save(path, *state, epoch=epoch + 1)

    check_equal_replicas(model)
    if accuracy is None:  # resumed after the last epoch
        accuracy = evaluate(model, test_loader, device, amp=args.amp)
    return {**figures, "accuracy": accuracy, "parameters": parameters_hash(model)}


def build_loaders(args: argparse.Namespace, env: LaunchEnvironment, device: torch.device) -> tuple:
    """Return the loaders of this rank's share of the training and the test images."""
    synthetic_images = 50_000 if device.type == "cuda" else 512  # a CPU is to be done in seconds
    train_set, test_set = data.load(
        args.data, args.image_size, args.data_dir, env.local_rank, args.timeout, synthetic_images
    )
    # BatchNorm cannot train on a single image: a last batch of one is left out.
    one_left = math.ceil(len(train_set) / env.world_size) % args.batch_size == 1
    workers = 2 if args.data == "cifar10" and device.type == "cuda" else 0
    share = {"rank": env.rank, "world_size": env.world_size, "num_workers": workers}
    return (
        data.train_loader(train_set, args.batch_size, seed=args.seed, drop_last=one_left, **share),
        data.evaluation_loader(test_set, args.batch_size, **share),
    )


def build_state(args: argparse.Namespace, device: torch.device, batches: int) -> tuple:
    """Return what a checkpoint holds: model, optimizer, scheduler, scaler."""
    if args.amp == "fp16" and device.type == "cpu":
        raise TrainingError("--amp fp16 crawls on a CPU: take --amp bf16, or leave it out.")
    model = wrap(
        get_model(args.arch, num_classes=10),
        device,
        channels_last=args.channels_last,
        compile=args.compile,
        sync_bn=args.sync_bn,
    )
    optimizer = torch.optim.SGD(
        model.parameters(), args.lr, momentum=0.9, weight_decay=5e-4, nesterov=True, fused=True
    )
    factor = partial(lr_factor, math.ceil(batches / args.accumulate))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    scaler = torch.amp.GradScaler(device.type, enabled=args.amp == "fp16")
    return model, optimizer, scheduler, scaler


def resume(path: Path, state: tuple, device: torch.device, log: logging.Logger) -> int:
    """Load the checkpoint, if there is one, and return the number of finished epochs."""
    if not all_sum([path.exists()], device).item():  # one rank sees it: all must load it
        log.info(f"no {path} yet: starting with epoch 1")
        return 0
    epochs = checkpoint.load(path, *state, map_location=device)
    log.info(f"continuing after epoch {epochs} of {path}")
    return epochs


def lr_factor(steps_per_epoch: int, step: int) -> float:
    """Return the part of --lr to use at step: up during the first epoch, then 1/epoch."""
    epochs = (step + 1) / steps_per_epoch  # not of --epochs: a resumed run may go on for longer
    return min(epochs, 1 / epochs)


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Return the arguments; a value that cannot work ends the process with status 2."""
    parser = build_parser()
    args = parse_args(parser, argv)
    for name in ("epochs", "batch_size", "lr", "image_size", "accumulate", "timeout"):
        if not 0 < getattr(args, name) < math.inf:
            parser.error(f"--{name} {getattr(args, name)}, expected a number above 0")
    if args.batch_size == 1 and args.image_size <= 32:
        parser.error("--batch_size 1 needs --image_size 33 or more: BatchNorm needs two values")
    if args.resume and not args.save:
        parser.error("--resume needs --save DIR, the folder of the checkpoint")
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    torch.set_flush_denormal(True)  # numbers next to 0 make a CPU many times slower
    with short_errors(*ERRORS):
        env = detect()
        set_threads(env.local_world_size)
        with process_group(env, args.backend, args.timeout) as device:
            figures = train(args, env, device)
            if args.result_dir:
                write_results(args.result_dir, args.gather_results, env, **figures)


if __name__ == "__main__":
    main()
