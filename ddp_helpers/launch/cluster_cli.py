"""python -m ddp_helpers cluster: two practice nodes on this machine.

Lesson: notebooks/06_two_nodes.ipynb
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys

from . import loopback_nodes
from .cluster import Cluster, ClusterError
from .practice_cluster import down, find, on_node, processes, up

_EXAMPLES = """\
examples:
  cluster up                                   two nodes, node1 and node2
  cluster exec node1 -- ssh node2 hostname     run a command on a node
  cluster exec node1 bash                      a shell on a node
  eval "$(python -m ddp_helpers cluster env)"  then ssh node1 works from this machine as well
  cluster down                                 remove the nodes and all that runs on them
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `cluster` to parser."""
    parser.epilog = _EXAMPLES
    commands = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    make = commands.add_parser("up", help="make the nodes; nothing happens if they are up")
    make.add_argument("--nodes", type=int, default=2, help="how many (default: 2)")
    make.add_argument("--rate", help="of each node's link, such as 1gbit or 200mbit")
    make.add_argument("--loopback", action="store_true", help="loopback addresses, as without root")
    run = commands.add_parser("exec", help="run a command on a node")
    run.add_argument("node", help="such as node1")
    run.add_argument("command", nargs=argparse.REMAINDER, metavar="[--] COMMAND", help="with args")
    for action in (
        make,
        run,
        commands.add_parser("env", help="print what lets this machine's shell reach the nodes"),
        commands.add_parser("status", help="show the nodes and what runs on them"),
        commands.add_parser("down", help="remove the nodes and all that runs on them"),
    ):
        action.add_argument("--name", default="practice", help="of the cluster (default: practice)")


def main(args: argparse.Namespace) -> int:
    """Do what args say; return 0, or 2 with the reason. exec ends with the command's own status."""
    try:
        if args.action == "up":
            _show(up(args.name, args.nodes, args.rate, args.loopback))
        elif args.action == "status":
            _show(find(args.name))
        elif args.action == "env":
            print(f'export PATH={shlex.quote(str(find(args.name).bin))}:"$PATH"')
        elif args.action == "down":
            gone = down(args.name)
            print(f"cluster {args.name} {'removed' if gone else 'was not up'}.")
        else:
            return _exec(find(args.name), args.node, args.command)
    except ClusterError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _exec(cluster: Cluster, node: str, command: list[str]) -> int:
    command = command[1:] if command[:1] == ["--"] else command
    if not command:
        raise ClusterError("no command.\nWrite: cluster exec node1 -- COMMAND")
    argv = on_node(cluster, node, command)
    os.execvp(argv[0], argv)  # its output, signals and status are the command's


def _show(cluster: Cluster) -> None:
    running = processes(cluster)
    rate = f", each link {cluster.rate}" if cluster.rate else ""
    print(f"cluster {cluster.name} is up: {len(cluster.nodes)} nodes{rate}")
    for node in cluster.nodes:
        print(f"  {node.name}  {node.address}")
        for pid, line in running[node.name]:
            print(f"    pid {pid}  {line[:100]}")
    if cluster.kind == "loopback":
        print(loopback_nodes.WHAT_IT_IS_NOT)
