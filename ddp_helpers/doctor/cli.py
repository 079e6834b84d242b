"""python -m ddp_helpers doctor: alone on a machine, or in every rank under any launcher.

    python -m ddp_helpers doctor --hosts node-a:2,node-b:2
    mpirun -n 4 -H node-a:2,node-b:2 ... python -m ddp_helpers doctor

Lesson: notebooks/08_when_it_hangs.ipynb
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import socket
import sys
from dataclasses import asdict
from typing import Any

from ddp_helpers.doctor.finding import Finding, is_healthy, write
from ddp_helpers.worker.environment import (
    LaunchEnvironment,
    LaunchEnvironmentError,
    add_local_rank_argument,
    detect,
)

_EXAMPLES = """\
examples:
  doctor                                          this machine
  doctor --hosts node-a:2,node-b:2                and the way to these hosts
  mpirun -n 4 ... python -m ddp_helpers doctor    in every rank: what a job of them would meet
  torchrun --nproc-per-node 2 ... -m ddp_helpers doctor
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `doctor` to parser."""
    parser.epilog = _EXAMPLES
    parser.allow_abbrev = False
    parser.add_argument("--hosts", help="alone: hosts to ask over ssh, such as node-a:2,node-b:2")
    parser.add_argument("--hostfile", metavar="FILE", help="alone: one `node-a slots=2` a line")
    parser.add_argument("--backend", choices=("auto", "gloo", "nccl"), default="auto")
    parser.add_argument(
        "--timeout", type=float, default=20.0, help="in ranks: seconds to wait for all of them"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    add_local_rank_argument(parser)


def main(args: argparse.Namespace) -> int:
    """Return 0 when nothing that stops jobs was found, 1 when something was, 2 for wrong use."""
    try:
        env = detect()
    except LaunchEnvironmentError as error:
        return _refused(args, socket.gethostname(), error)
    if env.launcher == "python":
        return _alone(args)
    if importlib.util.find_spec("torch") is None:
        missing = ModuleNotFoundError(
            f"torch is not installed for {sys.executable}\n"
            "Start the ranks with the path of the interpreter that has it, on every node."
        )
        return _refused(args, f"rank {env.rank} on {socket.gethostname()}", missing)
    return _in_rank(args, env)


def _alone(args: argparse.Namespace) -> int:
    from ddp_helpers.doctor.machine import USER_ERRORS, examine

    try:
        findings = examine(args)
    except USER_ERRORS as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if args.json:
        _print_json(findings, [], {})
    else:
        print(write(findings))
    return int(not is_healthy(findings))


def _in_rank(args: argparse.Namespace, env: LaunchEnvironment) -> int:
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # what it warns of is told in a line
    import torch

    from ddp_helpers.doctor.ladder import World, climb
    from ddp_helpers.doctor.verdict import judge, speeds, table
    from ddp_helpers.worker.rendezvous import RendezvousError

    def tell(world: World) -> bool:
        findings = judge(world)
        if args.json:
            _print_json(findings, [one.as_json() for one in world.facts.values()], world.speeds)
        else:
            print("", table(world), "", *speeds(world), write(findings), sep="\n", flush=True)
        return is_healthy(findings)

    def say(line: str) -> None:
        if not args.json:
            print(line, flush=True)

    backend = args.backend
    if backend == "auto":
        backend = "nccl" if torch.cuda.is_available() else "gloo"
    if env.rank == 0:
        say(f"variables      {env.launcher}: rank 0 of {env.world_size}")
        say(f"master         {env.master_addr or 'this node'}:{env.master_port or 'any free port'}")
    try:
        return int(not climb(env, backend, args.timeout, tell, say))
    except (LaunchEnvironmentError, RendezvousError) as error:
        return _refused(args, f"rank {env.rank} on {socket.gethostname()}", error)


def _refused(args: argparse.Namespace, where: str, error: Exception) -> int:
    seen, *fix = str(error).splitlines()
    findings = [Finding("fault", where, seen, "\n".join(fix))]
    if args.json:
        _print_json(findings, [], {})
    else:
        sys.stderr.write(f"{write(findings)}\n")  # one write: ranks share the terminal
    return 1


def _print_json(findings: list[Finding], ranks: list[dict[str, Any]], speeds: dict) -> None:
    measured = [
        {"from": a, "to": b, "round_trip_s": seconds, "bits_per_s": rate}
        for (a, b), (seconds, rate) in speeds.items()
    ]
    document = {"healthy": is_healthy(findings), "findings": [asdict(one) for one in findings]}
    print(json.dumps({**document, "ranks": ranks, "speeds": measured}, indent=1), flush=True)
