"""The options and the last step that all scripts share: a result file for each rank.

    add_result_arguments(parser)
    args = parse_args(parser, argv)
    with process_group(env) as device:
        write_results(args.result_dir, args.gather_results, env, loss=loss)

Lesson: notebooks/01_processes_and_ranks.ipynb
"""

from __future__ import annotations

import argparse
import socket
from typing import Any

import torch.distributed as dist

from ddp_helpers.results import write_result
from ddp_helpers.worker.environment import LaunchEnvironment


def add_result_arguments(parser: argparse.ArgumentParser) -> None:
    """Accept --result_dir DIR and --gather_results, also written with -."""
    parser.add_argument("--result_dir", "--result-dir", help="write rank_R.json files here")
    parser.add_argument(
        "--gather_results",
        "--gather-results",
        action="store_true",
        help="rank 0 writes the files of all ranks: for nodes that share no folder",
    )


def parse_args(parser: argparse.ArgumentParser, argv: list[str] | None) -> argparse.Namespace:
    """Return the arguments; --gather_results without --result_dir ends with status 2."""
    args = parser.parse_args(argv)
    if args.gather_results and not args.result_dir:
        parser.error("--gather_results needs --result_dir DIR, the folder on rank 0's node")
    return args


def write_results(result_dir: str, gather: bool, env: LaunchEnvironment, **fields: Any) -> None:
    """Write who this rank is, and fields, to result_dir/rank_R.json.

    With gather every rank must call it, while it has its process group: rank 0 then writes the
    files of all ranks, to its own disk, and the others write none.
    """
    mine = {
        "local_rank": env.local_rank,
        "world_size": env.world_size,
        "launcher": env.launcher,
        "host": socket.gethostname(),
        "backend": dist.get_backend(),
        **fields,
    }
    of_ranks = {env.rank: mine}
    if gather:
        gathered = [None] * env.world_size if env.rank == 0 else None
        dist.gather_object(mine, gathered)
        of_ranks = dict(enumerate(gathered or []))
    for rank, result in of_ranks.items():
        write_result(result_dir, rank, **result)
