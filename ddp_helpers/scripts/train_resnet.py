"""Train a ResNet on many processes, with one script for every launcher.

    python -m torch.distributed.run --nproc_per_node=2 -m ddp_helpers.scripts.train_resnet
    mpirun -np 2 python -m ddp_helpers.scripts.train_resnet --backend gloo --epochs 3
    python -m ddp_helpers.scripts.train_resnet --use_syn --arch resnet50 --image_size 64

--batch_size counts the images of one rank: a step uses world_size times as many.
With --save DIR --resume the same command continues what an earlier one has saved. SIGTERM and
SIGUSR1, to one rank or all, save once more and end with status 143 on all ranks.
Lesson: notebooks/04_resnet_ddp.ipynb
"""

import argparse
import contextlib
import dataclasses
import logging
import math
from collections.abc import Callable
from functools import partial

import torch
from torchvision.models import get_model

from ddp_helpers.scripts.result_files import add_result_arguments, parse_args, write_results
from ddp_helpers.worker import checkpoint, data, rotation
from ddp_helpers.worker.checks import TrainingError, check_equal_replicas, parameters_hash
from ddp_helpers.worker.console import progress, rank_logger, short_errors
from ddp_helpers.worker.environment import (
    LaunchEnvironment,
    LaunchEnvironmentError,
    add_local_rank_argument,
    detect,
)
from ddp_helpers.worker.process_group import process_group
from ddp_helpers.worker.rendezvous import RendezvousError
from ddp_helpers.worker.replica import COMPRESSIONS, peak_memory_mb, set_seed, set_threads, wrap
from ddp_helpers.worker.stop import STOPPED, stop_notice
from ddp_helpers.worker.training import Progress, evaluate, rehearse, train_one_epoch
from ddp_helpers.worker.watchdog import PeerFailed, watchdog

ERRORS = (
    LaunchEnvironmentError,
    RendezvousError,
    data.DataNotAvailable,
    checkpoint.CheckpointError,
    TrainingError,
    PeerFailed,
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
    add("--bucket_mb", type=float, help="MiB of gradients exchanged in one piece")
    add("--no_bucket_view", action="store_true", help="copy gradients to be exchanged")
    add("--static_graph", action="store_true", help="promise DDP equal steps")
    add("--compress", choices=COMPRESSIONS, help="how gradients travel; changes results")
    add("--threads", type=int, help="of a rank (default: OMP_NUM_THREADS, else its cores)")
    add("--workers", type=int, help="processes per rank that load data (default: 2 for cifar10)")
    add("--save", metavar="DIR", help="write a checkpoint to DIR after each epoch")
    add("--save_every", type=int, metavar="N", help="and after every N steps of an epoch")
    add("--keep", type=int, default=3, help="checkpoints to keep, the newest")
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
    rehearse(model, train_loader, device, args.amp)
    # A step number of a checkpoint means the same images only where these are the same.
    layout = {name: getattr(args, name) for name in ("data", "seed", "batch_size", "accumulate")}
    first_epoch, begin = resume(args, state, layout, device, log)
    options = {"scheduler": scheduler, "scaler": scaler, "amp": args.amp}
    options |= {"accumulate": args.accumulate, "progress": partial(progress, rank=env.rank)}
    save = partial(rotation.save_next, args.save, args.keep, *state, layout=layout)

    accuracy, figures = None, {"loss": None, "images_per_s": None}
    # Without a folder to save to, a signal may as well end the process at once.
    with stop_notice(device) if args.save else contextlib.nullcontext() as stop_now:
        for epoch in range(first_epoch, args.epochs):
            after_step = saver(args, partial(save, epoch=epoch), stop_now, log)
            options |= {"begin": begin, "after_step": after_step}
            result = train_one_epoch(model, train_loader, optimizer, device, epoch, **options)
            begin = None
            accuracy = evaluate(model, test_loader, device, amp=args.amp)
            figures = {"loss": result.loss, "images_per_s": result.images_per_s}
            log.info(
                f"epoch {epoch + 1}/{args.epochs}  loss {result.loss:.4f}"
                f"  accuracy {result.accuracy:.4f}  test accuracy {accuracy:.4f}"
                f"  {result.images_per_s:.0f} images/s"
            )
            if args.save:
                save(epoch=epoch + 1)

    check_equal_replicas(model)
    if accuracy is None:  # resumed after the last epoch
        accuracy = evaluate(model, test_loader, device, amp=args.amp)
    figures |= {"accuracy": accuracy, "memory_mb": peak_memory_mb(device)}
    return {**figures, "parameters": parameters_hash(model)}


def build_loaders(args: argparse.Namespace, env: LaunchEnvironment, device: torch.device) -> tuple:
    """Return the loaders of this rank's share of the training and the test images."""
    synthetic_images = 50_000 if device.type == "cuda" else 512  # a CPU is to be done in seconds
    train_set, test_set = data.load(
        args.data, args.image_size, args.data_dir, env.local_rank, args.timeout, synthetic_images
    )
    # BatchNorm cannot train on a single image: a last batch of one is left out.
    one_left = math.ceil(len(train_set) / env.world_size) % args.batch_size == 1
    workers = 2 if args.data == "cifar10" and device.type == "cuda" else 0
    if args.workers is not None:
        workers = args.workers
    share = {"rank": env.rank, "world_size": env.world_size, "num_workers": workers}
    return (
        data.train_loader(train_set, args.batch_size, seed=args.seed, drop_last=one_left, **share),
        data.evaluation_loader(test_set, args.batch_size, **share),
    )


def build_state(args: argparse.Namespace, device: torch.device, batches: int) -> tuple:
    """Return what a checkpoint holds: model, optimizer, scheduler, scaler."""
    if args.amp == "fp16" and device.type == "cpu":
        raise TrainingError("--amp fp16 crawls on a CPU: take --amp bf16, or leave it out.")
    model = wrap(get_model(args.arch, num_classes=10), device, **replica_options(args))
    optimizer = build_optimizer(args, model)
    factor = partial(lr_factor, math.ceil(batches / args.accumulate))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    scaler = torch.amp.GradScaler(device.type, enabled=args.amp == "fp16")
    return model, optimizer, scheduler, scaler


def replica_options(args: argparse.Namespace) -> dict:
    """Return the options of wrap that args choose."""
    names = ("channels_last", "compile", "sync_bn", "bucket_mb", "static_graph", "compress")
    return {name: getattr(args, name) for name in names} | {"bucket_view": not args.no_bucket_view}


def build_optimizer(args: argparse.Namespace, model: torch.nn.Module) -> torch.optim.Optimizer:
    """Return SGD as ResNets are trained with, in its fused form."""
    return torch.optim.SGD(
        model.parameters(), args.lr, momentum=0.9, weight_decay=5e-4, nesterov=True, fused=True
    )


def resume(
    args: argparse.Namespace,
    state: tuple,
    layout: dict,
    device: torch.device,
    log: logging.Logger,
) -> tuple[int, Progress | None]:
    """Load the newest checkpoint, if there is one; return finished epochs, progress in the next.

    Without --resume, a folder that holds checkpoints is refused.
    """
    if not args.resume:
        if args.save:
            rotation.refuse_used(args.save)
        return 0, None
    options = {"map_location": device, "layout": layout, "say": log.info}
    position = rotation.load_newest(args.save, *state, **options)
    if position is None:
        log.info(f"no checkpoint in {args.save} yet: starting with epoch 1")
        return 0, None
    return position.epoch, Progress(**position.mine) if position.step else None


def saver(
    args: argparse.Namespace, save: Callable, stop_now: Callable | None, log: logging.Logger
) -> Callable | None:
    """Return what train_one_epoch calls after each step: it saves when it is time, or the end."""

    def after_step(step: int, progress: Callable[[], Progress]) -> None:
        stop = stop_now()
        if stop or (args.save_every and step % args.save_every == 0):
            path = save(step=step, mine=dataclasses.asdict(progress()))
        if stop:
            log.info(f"stopped by a signal, saved {path}: continue with --resume")
            raise SystemExit(STOPPED)

    return after_step if args.save else None


def lr_factor(steps_per_epoch: int, step: int) -> float:
    """Return the part of --lr to use at step: up during the first epoch, then 1/epoch."""
    epochs = (step + 1) / steps_per_epoch  # not of --epochs: a resumed run may go on for longer
    return min(epochs, 1 / epochs)


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Return the arguments; a value that cannot work ends the process with status 2."""
    parser = build_parser()
    args = parse_args(parser, argv)
    above_0 = ["epochs", "batch_size", "lr", "image_size", "accumulate", "timeout", "keep"]
    optional = ("save_every", "bucket_mb", "threads")
    above_0 += [name for name in optional if getattr(args, name) is not None]
    for name in above_0:
        if not 0 < getattr(args, name) < math.inf:
            parser.error(f"--{name} {getattr(args, name)}, expected a number above 0")
    if args.batch_size == 1 and args.image_size <= 32:
        parser.error("--batch_size 1 needs --image_size 33 or more: BatchNorm needs two values")
    for name in ("resume", "save_every"):
        if getattr(args, name) and not args.save:
            parser.error(f"--{name} needs --save DIR, the folder of the checkpoints")
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    torch.set_flush_denormal(True)  # numbers next to 0 make a CPU many times slower
    with short_errors(*ERRORS):
        env = detect()
        set_threads(env.local_world_size, args.threads)
        group = process_group(env, args.backend, args.timeout)
        with group as device, watchdog(env.rank, env.world_size):
            figures = train(args, env, device)
            if args.result_dir:
                write_results(args.result_dir, args.gather_results, env, **figures)


if __name__ == "__main__":
    main()
