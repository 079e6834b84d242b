"""python -m ddp_helpers run SCRIPT: give a script written for torchrun its variables.

    mpirun -np 4 python -m ddp_helpers run train.py --epochs 3

The script finds RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT as
torchrun would have set them, whatever launcher started this process, and runs unchanged.
Lesson: notebooks/05_three_launchers.ipynb
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from dataclasses import replace
from pathlib import Path

from ddp_helpers.worker import network
from ddp_helpers.worker.environment import LaunchEnvironment, LaunchEnvironmentError, detect


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "Example: mpirun -np 4 python -m ddp_helpers run train.py --epochs 3"
    parser.add_argument(
        "target",
        nargs=argparse.REMAINDER,
        metavar="SCRIPT | -m MODULE",
        help="what to run, followed by its own arguments",
    )


def main(args: argparse.Namespace) -> int:
    """Run the script in this process; its exceptions and exit status are its own."""
    is_module = args.target[:1] == ["-m"]
    target, *script_args = args.target[1:] if is_module else args.target or [None]
    if target is None or (not is_module and not Path(target).is_file()):
        return _wrong_use(
            f"no script {target}: give SCRIPT or -m MODULE."
            if target
            else "nothing to run: give SCRIPT or -m MODULE."
        )
    try:
        env = detect()
        # Imports torch, which the script is about to do as well.
        from ddp_helpers.worker.process_group import interface_variables
        from ddp_helpers.worker.rendezvous import check_master, check_port, serves_store

        interface = check_master(env)
        if env.master_port and serves_store(env):
            check_port(env.master_port)
        env = _with_master(env)
    except (LaunchEnvironmentError, TimeoutError) as error:
        return _wrong_use(str(error), status=1)
    os.environ.update(torchrun_variables(env))
    sys.argv = [target, *script_args]
    try:
        with interface_variables(interface):
            if is_module:
                runpy.run_module(target, run_name="__main__", alter_sys=True)
            else:
                sys.path.insert(0, str(Path(target).resolve().parent))
                runpy.run_path(target, run_name="__main__")
    finally:
        if env.rank == 0:
            network.remove_meeting_port()
    return 0


def torchrun_variables(env: LaunchEnvironment) -> dict[str, str]:
    """Return the variables torchrun would set for this rank. env must name a master."""
    variables = {
        "RANK": env.rank,
        "WORLD_SIZE": env.world_size,
        "LOCAL_RANK": env.local_rank,
        "LOCAL_WORLD_SIZE": env.local_world_size,
        "GROUP_RANK": env.node_rank,
        "MASTER_ADDR": env.master_addr,
        "MASTER_PORT": env.master_port,
    }
    return {name: str(value) for name, value in variables.items() if value is not None}


def _with_master(env: LaunchEnvironment, timeout_s: float = 60.0) -> LaunchEnvironment:
    """Return env with a master: its own, or a port of this machine that its ranks agree on."""
    if env.master_addr is not None:
        return env
    if env.rank == 0:
        port = network.free_port()
        network.write_meeting_port(port)
    else:
        port = network.read_meeting_port(timeout_s)
    return replace(env, master_addr="127.0.0.1", master_port=port)


def _wrong_use(message: str, status: int = 2) -> int:
    print(f"error: {message}", file=sys.stderr)
    return status
