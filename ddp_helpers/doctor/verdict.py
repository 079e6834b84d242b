"""Which rank or node is at fault, why, and what to type: a pure function of what was learned.

Lesson: notebooks/08_when_it_hangs.ipynb
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence

from ddp_helpers.doctor.facts import Facts
from ddp_helpers.doctor.finding import Finding, write_table
from ddp_helpers.doctor.ladder import World


def judge(world: World) -> list[Finding]:
    """Return the findings on a job: the causes first, then what follows, then what is odd."""
    ranks = list(world.facts.values())
    findings = [
        *_missing(world),
        *_twice(world),
        *_world_sizes(world, ranks),
        *_interfaces(ranks),
        *_silent(world),
        *_unreachable(world),
        *_devices(ranks),
        *_versions(ranks),
        *_group(world),
        *_host_names(ranks),
        *_threads(ranks),
    ]
    if not any(one.level == "fault" for one in findings):
        nodes = len({one.host for one in ranks})
        where = "one node" if nodes == 1 else f"{nodes} nodes"
        findings.append(Finding("ok", "job", f"{len(ranks)} ranks on {where} work together"))
    return findings


def table(world: World) -> str:
    """Return a row for each rank that came; what differs from the others is marked with *."""
    names = ("rank", "host", "local", "device", "interface", "interpreter", "python", "torch")
    rows = [
        (
            *(str(one.rank), one.host, str(one.local_rank), one.device),
            f"{one.interface} {one.address}".strip() or "none",
            *(one.interpreter, one.python, one.torch),
        )
        for one in world.facts.values()
    ]
    return write_table(names, rows)


def speeds(world: World) -> list[str]:
    """Return a line for each pair of nodes that was measured."""
    return [
        f"{a} to {b}: {round_trip * 1e3:.2f} ms round trip, {_rate(bits)}"
        for (a, b), (round_trip, bits) in world.speeds.items()
    ]


def _rate(bits_per_s: float) -> str:
    return (
        f"{bits_per_s / 1e9:.1f} Gbit/s" if bits_per_s >= 1e9 else f"{bits_per_s / 1e6:.0f} Mbit/s"
    )


def _missing(world: World) -> Iterable[Finding]:
    missing = [rank for rank in range(world.world_size) if rank not in world.facts]
    if missing:
        here = len(world.facts)
        yield Finding(
            "fault",
            _name_ranks(missing),
            f"did not come within {world.waited_s:g} s; {here} of {world.world_size} ranks did",
            "Look at their output: each says itself why it cannot come. No output: they were not"
            "\nstarted. torchrun has to be typed on every node, each with its own --node-rank.",
        )


def _twice(world: World) -> Iterable[Finding]:
    for rank, second in world.twice.items():
        one = world.facts[rank]
        seen = f"was started twice: pid {one.pid} on {one.host}, and {second}"
        fix = "Stop the older job, or give each job a MASTER_PORT of its own."
        yield Finding("fault", f"rank {rank}", seen, fix)


def _world_sizes(world: World, ranks: Sequence[Facts]) -> Iterable[Finding]:
    for one in ranks:
        if one.world_size != world.world_size:
            yield Finding(
                "fault",
                _name(one),
                f"has a world size of {one.world_size}, rank 0 has {world.world_size}",
                "Start all ranks of a job with the same command.",
            )


def _interfaces(ranks: Sequence[Facts]) -> Iterable[Finding]:
    several = len({one.host for one in ranks}) > 1
    for host, group in _by_host(ranks).items():
        one = group[0]
        good = one.to_master
        if not one.address:
            seen = f"{one.chosen_by}={one.interface}: there is no interface of that name"
            cure = f"On {host}: export {one.chosen_by}={good}, or unset it."
            yield Finding("fault", host, seen, cure)
        elif several and not _is_outside(one):
            cause = f"{one.chosen_by}={one.interface}" if one.chosen_by else one.interface
            yield Finding(
                "fault",
                host,
                f"{cause} is {one.address}, which no other node can reach",
                f"On {host}: unset {one.chosen_by}, or export {one.chosen_by}={good}"
                if one.chosen_by
                else "Set MASTER_ADDR to an address of rank 0's node in the network.",
            )


def _silent(world: World) -> Iterable[Finding]:
    for step, ranks in world.silent.items():
        for rank in ranks:
            yield Finding(
                "fault",
                _name(world.facts[rank]),
                f"came, and then did not answer ({step}): it was stopped, has ended, or its node"
                " has",
                f"Look at pid {world.facts[rank].pid} on {world.facts[rank].host}.",
            )


def _unreachable(world: World) -> Iterable[Finding]:
    """Name a link once for a pair of nodes, and a rank where only one is concerned."""
    reasons: dict[tuple[str, str, str], list[tuple[int, int]]] = {}
    for (a, b), why in world.unreachable.items():
        key = world.facts[a].host, world.facts[b].host, why
        reasons.setdefault(key, []).append((a, b))
    for (a, b, why), pairs in reasons.items():
        target = world.facts[pairs[0][1]]
        if not _is_outside(target) and a != b:
            continue  # _interfaces has named it
        yield Finding(
            "fault",
            f"{a} to {b}",
            f"{_name_ranks(sorted({p[0] for p in pairs}))} cannot connect to"
            f" {_name_ranks(sorted({p[1] for p in pairs}))} at {target.address}: {why}",
            f"gloo, nccl and MPI take any port from 1024: open them on {b} for {a}, such as\n"
            f"sudo ufw allow from {world.facts[pairs[0][0]].address or a}\n"
            f"Try from {a}: nc -vz {target.address} {target.place[1] if target.place else ''}",
        )


def _devices(ranks: Sequence[Facts]) -> Iterable[Finding]:
    for host, group in _by_host(ranks).items():
        for one in group:
            if one.device == "none":
                yield Finding(
                    "fault",
                    _name(one),
                    f"local rank {one.local_rank} has no GPU of its own on {host}",
                    "Start at most as many ranks on a node as it has GPUs, or use --backend gloo.",
                )
        of_local: dict[int, list[int]] = {}
        for one in group:
            of_local.setdefault(one.local_rank, []).append(one.rank)
        for local_rank, same in of_local.items():
            if len(same) > 1:
                yield Finding(
                    "fault",
                    host,
                    f"{_name_ranks(same)} all have local rank {local_rank}, and so one GPU",
                    "Take the local rank from the launcher's own variable, not from the rank.",
                )


def _versions(ranks: Sequence[Facts]) -> Iterable[Finding]:
    for field, level in (("torch", "fault"), ("python", "warning"), ("ddp_helpers", "warning")):
        yield from _different(ranks, field, level, "Install the same version on every node.")
    yield from _different(
        ranks, "interpreter", "warning", "Use one path on every node: mpirun starts that path."
    )


def _different(ranks: Sequence[Facts], field: str, level: str, fix: str) -> Iterable[Finding]:
    values = [getattr(one, field) for one in ranks]
    usual = max(values, key=values.count, default=None)
    odd: dict[tuple[str, str], list[int]] = {}
    for one in ranks:
        if getattr(one, field) != usual:
            odd.setdefault((one.host, getattr(one, field)), []).append(one.rank)
    for (host, value), numbers in odd.items():
        yield Finding(
            level, host, f"{field} is {value} on {_name_ranks(numbers)}, elsewhere {usual}", fix
        )


def _group(world: World) -> Iterable[Finding]:
    reasons: dict[str, list[int]] = {}
    for rank, why in world.group.items():
        reasons.setdefault(why, []).append(rank)
    for why, numbers in reasons.items():
        seen, *fix = why.splitlines()
        yield Finding("fault", _name_ranks(numbers), seen, "\n".join(fix))


def _host_names(ranks: Sequence[Facts]) -> Iterable[Finding]:
    if len({one.host for one in ranks}) < 2:
        return
    for host, (one, *_) in _by_host(ranks).items():
        loopback = one.host_address and ipaddress.ip_address(one.host_address).is_loopback
        if (loopback or not one.host_address) and not one.chosen_by and one.backend == "gloo":
            meaning = f"is {one.host_address} there" if loopback else "does not resolve there"
            yield Finding(
                "warning",
                host,
                f"its own name {meaning}: a script that calls init_process_group itself hangs"
                " (process_group does not)",
                f"On {host}: export GLOO_SOCKET_IFNAME={one.interface}",
            )


def _threads(ranks: Sequence[Facts]) -> Iterable[Finding]:
    for host, group in _by_host(ranks).items():
        one = group[0]
        if one.cores == 1 < one.cores_of_node:
            yield Finding(
                "warning",
                host,
                f"each rank is bound to one of {one.cores_of_node} cores",
                "Add to mpirun: --bind-to none",
            )
        threads = sum(each.threads for each in group)
        if threads > max(one.cores_of_node, len(group)):
            yield Finding(
                "warning",
                host,
                f"{threads} threads on {one.cores_of_node} cores ({len(group)} ranks)",
                f"export OMP_NUM_THREADS={max(1, one.cores_of_node // len(group))}",
            )


def _is_outside(one: Facts) -> bool:
    return bool(one.address) and not ipaddress.ip_address(one.address.split("%")[0]).is_loopback


def _by_host(ranks: Sequence[Facts]) -> dict[str, list[Facts]]:
    found: dict[str, list[Facts]] = {}
    for one in ranks:
        found.setdefault(one.host, []).append(one)
    return found


def _name(one: Facts) -> str:
    return f"rank {one.rank} on {one.host}"


def _name_ranks(numbers: Sequence[int]) -> str:
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
