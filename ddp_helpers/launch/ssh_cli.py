"""python -m ddp_helpers ssh: can jobs be started on other hosts, and the key that this takes.

Lesson: notebooks/06_two_nodes.ipynb
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from .hosts import HostfileError, parse_hosts, read_hostfile
from .mpi import LauncherNotFound
from .ssh_check import Check, check_hosts
from .ssh_keys import KeyNotMade, copy, copy_command, ensure_key, ssh_folder

_EXAMPLES = """\
examples:
  ssh keys node-a node-b          make a key if you have none; print what hands it to the hosts
  ssh keys --run node-a node-b    and run that: it asks for your password on each host
  ssh check node-a node-b         ask all hosts at once, in under 10 seconds; it changes nothing
  ssh check --hostfile hosts.txt -F my_ssh_config
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `ssh` to parser."""
    parser.epilog = _EXAMPLES
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.allow_abbrev = False
    actions = parser.add_subparsers(dest="action", metavar="keys | check", required=True)
    keys = actions.add_parser("keys", help="make a key if you have none, and hand it to hosts")
    check = actions.add_parser("check", help="check the way to each host, and what is on it")
    for action in (keys, check):
        action.allow_abbrev = False
        action.add_argument("names", metavar="HOST", nargs="*", help="the name of a host")
        action.add_argument("--hosts", help="the same as a list, such as node-a:2,node-b:2")
        action.add_argument("--hostfile", metavar="FILE", help="one `node-a slots=2` a line")
        action.add_argument("-F", dest="config", metavar="FILE", help="ssh's configuration file")
    keys.add_argument("--run", action="store_true", help="run the commands, and do not print them")
    keys.add_argument(
        "--folder", type=Path, metavar="DIR", help="where your keys are (default: ~/.ssh)"
    )


def main(args: argparse.Namespace) -> int:
    """Do what args describe; return 0, 1 (a check or a copy failed) or 2 (wrong use)."""
    try:
        hosts = _hosts(args)
        if args.config not in (None, "none") and not Path(args.config).is_file():
            raise HostfileError(f"{args.config} not found.\nExpected ssh's configuration file.")
        if args.action == "keys":
            return _keys(hosts, args)
        checks = check_hosts(hosts, args.config)
        print("\n".join(_table(checks)))
        return int(any(check.ok is False for check in checks))
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return 130
    except KeyNotMade as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except (HostfileError, LauncherNotFound) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _hosts(args: argparse.Namespace) -> list[str]:
    """Return the names of the hosts that args give in one of three ways."""
    ways = [way for way in (args.names, args.hosts, args.hostfile) if way]
    if len(ways) > 1:
        raise HostfileError("hosts given twice.\nGive names, or --hosts, or --hostfile.")
    if not ways and args.action == "check":
        raise HostfileError("no host given.\nType: python -m ddp_helpers ssh check node-a node-b")
    if args.hostfile:
        return [host.name for host in read_hostfile(args.hostfile)]
    return [host.name for host in parse_hosts(args.hosts or ",".join(args.names))] if ways else []


def _keys(hosts: Sequence[str], args: argparse.Namespace) -> int:
    """Make a key if there is none; print, or run, what hands it to hosts."""
    key, made = ensure_key(args.folder or ssh_folder())
    print(f"{'Made' if made else 'You have'} {key}{' (it has no passphrase)' if made else ''}.")
    commands = [copy_command(key, host, args.config) for host in hosts]
    if args.run:
        copied = [copy(command) for command in commands]  # every host, also after one that failed
        return int(not all(copied))
    for command in commands:
        print(shlex.join(command))
    return 0


def _table(checks: Sequence[Check]) -> list[str]:
    """Return a line per check, and under each that failed what to type."""
    widths = [max(len(word) for word in words) for words in zip(*map(_names, checks), strict=True)]
    lines = []
    for check in checks:
        host, name = (word.ljust(width) for word, width in zip(_names(check), widths, strict=True))
        state = {True: "ok  ", False: "FAIL", None: "-   "}[check.ok]
        lines.append(f"{host}  {name}  {state}  {check.seen}".rstrip())
        if check.fix:
            lines.append(f"{' ' * widths[0]}  fix: {check.fix}")
    return lines


def _names(check: Check) -> tuple[str, str]:
    return check.host, check.name
