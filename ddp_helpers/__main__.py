"""python -m ddp_helpers COMMAND: each command is a module, imported only when it is chosen."""

from __future__ import annotations

import argparse
import importlib
import sys

# command -> (module with add_arguments(parser) and main(args) -> exit status, one line of help)
COMMANDS = {
    "launch": ("ddp_helpers.launch.cli", "print, or run, the commands that start a job"),
    "doctor": ("ddp_helpers.doctor.cli", "what is wrong here, or in a job's ranks, and what to do"),
    "bench": ("ddp_helpers.bench.cli", "measure a job, predict it elsewhere, find its settings"),
    "cluster": ("ddp_helpers.launch.cluster_cli", "two practice nodes on this machine"),
    "demo": ("ddp_helpers.launch.demo", "run both scripts under every launcher, on this machine"),
    "ssh": (
        "ddp_helpers.launch.ssh_cli",
        "check the way to other hosts; make the key for it",
    ),
    "run": ("ddp_helpers.scripts.run_script", "inside a rank: run a script written for torchrun"),
}


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] in COMMANDS:
        module_name, description = COMMANDS[argv[0]]
        module = importlib.import_module(module_name)
        parser = argparse.ArgumentParser(
            prog=f"python -m ddp_helpers {argv[0]}",
            description=f"{description[0].upper()}{description[1:]}.",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(parser)
        return module.main(parser.parse_args(argv[1:]))
    parser = argparse.ArgumentParser(
        prog="python -m ddp_helpers",
        description="Launch PyTorch DDP jobs.",
        epilog="Each command has its own --help.",
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, (_, description) in COMMANDS.items():
        commands.add_parser(name, help=description, add_help=False)
    parser.parse_args(argv)
    return 0


if __name__ == "__main__":
    sys.exit(main())
