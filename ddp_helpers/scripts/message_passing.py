"""Rank 0 sends a number to every other rank.

    python -m torch.distributed.run --nproc_per_node=4 -m ddp_helpers.scripts.message_passing
    mpirun -np 4 python -m ddp_helpers.scripts.message_passing --backend gloo

Lesson: notebooks/02_message_passing.ipynb
"""

import argparse

import torch
import torch.distributed as dist

from ddp_helpers.scripts.result_files import add_result_arguments, parse_args, write_results
from ddp_helpers.worker.console import say, short_errors
from ddp_helpers.worker.environment import (
    LaunchEnvironmentError,
    add_local_rank_argument,
    detect,
)
from ddp_helpers.worker.process_group import process_group
from ddp_helpers.worker.rendezvous import RendezvousError
from ddp_helpers.worker.watchdog import PeerFailed, watchdog


def pass_message(rank: int, world_size: int, device: torch.device) -> float:
    """Return the number this rank holds after rank 0 has sent 42 to all the others."""
    number = torch.full((1,), 42.0 if rank == 0 else 0.0, device=device)
    if rank == 0:
        for dst in range(1, world_size):
            dist.send(number, dst=dst)
            say(rank, f"sent {number.item()} to rank {dst}")
    else:
        dist.recv(number, src=0)
        say(rank, f"received {number.item()} from rank 0")
    return number.item()


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Rank 0 sends a number to every other rank.")
    parser.add_argument("--backend", choices=["auto", "gloo", "nccl"], default="auto")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds to wait for a rank")
    add_result_arguments(parser)
    add_local_rank_argument(parser)
    return parser


def main(argv: list[str] | None = None) -> None:
    args = parse_args(build_parser(), argv)
    with short_errors(LaunchEnvironmentError, RendezvousError, PeerFailed):
        env = detect()
        group = process_group(env, args.backend, args.timeout)
        with group as device, watchdog(env.rank, env.world_size):
            number = pass_message(env.rank, env.world_size, device)
            if args.result_dir:
                write_results(args.result_dir, args.gather_results, env, number=number)


if __name__ == "__main__":
    main()
