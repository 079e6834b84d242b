"""The verdict, from facts alone: which rank or node, why, and what to type."""

from dataclasses import replace

import pytest

from ddp_helpers.doctor.facts import Facts, from_json
from ddp_helpers.doctor.ladder import World
from ddp_helpers.doctor.verdict import judge, speeds, table

FIRST = Facts(
    rank=0,
    world_size=4,
    local_rank=0,
    local_world_size=2,
    launcher="torchrun",
    host="node1",
    pid=100,
    backend="gloo",
    device="cpu",
    interface="eth0",
    address="10.0.0.1",
    chosen_by="",
    to_master="eth0",
    host_address="10.0.0.1",
    place=("10.0.0.1", 40000),
    interpreter="/opt/bin/python",
    python="3.11.2",
    torch="2.14.1",
    ddp_helpers="0.1.0",
    cores=8,
    cores_of_node=8,
    threads=4,
)


def world(**of_ranks) -> World:
    """Return a healthy job of two nodes with two ranks each, but for the facts given: r3={...}."""
    made = World("torchrun", 4, waited_s=20)
    for rank in range(4):
        node = rank // 2 + 1
        address = f"10.0.0.{node}"
        fields = {"rank": rank, "local_rank": rank % 2, "host": f"node{node}", "pid": 100 + rank}
        fields |= {"address": address, "host_address": address, "place": (address, 40000 + rank)}
        made.facts[rank] = replace(FIRST, **{**fields, **of_ranks.get(f"r{rank}", {})})
    return made


def found(made: World) -> list[tuple[str, str, str]]:
    return [(one.level, one.where, one.seen) for one in judge(made)]


def test_a_healthy_job_is_told_in_one_line():
    assert found(world()) == [("ok", "job", "4 ranks on 2 nodes work together")]


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (
            {"r3": {"torch": "2.6.0"}},
            ("fault", "node2", "torch is 2.6.0 on rank 3, elsewhere 2.14.1"),
        ),
        (
            {"r2": {"interpreter": "/usr/bin/python"}, "r3": {"interpreter": "/usr/bin/python"}},
            ("warning", "node2", "interpreter is /usr/bin/python on ranks 2, 3, elsewhere /opt/"),
        ),
        (
            {"r1": {"local_rank": 0}},
            ("fault", "node1", "ranks 0, 1 all have local rank 0, and so one GPU"),
        ),
        (
            {"r3": {"device": "none"}},
            ("fault", "rank 3 on node2", "local rank 1 has no GPU of its own on node2"),
        ),
        (
            {"r2": {"cores": 1}, "r3": {"cores": 1}},
            ("warning", "node2", "each rank is bound to one of 8 cores"),
        ),
        ({"r2": {"threads": 8}}, ("warning", "node2", "12 threads on 8 cores (2 ranks)")),
        (
            {"r3": {"world_size": 3}},
            ("fault", "rank 3 on node2", "has a world size of 3, rank 0 has 4"),
        ),
        (
            {"r2": {"host_address": ""}},
            ("warning", "node2", "its own name does not resolve there: a script"),
        ),
    ],
)
def test_facts_that_differ_are_named_with_rank_or_node(facts, expected):
    level, where, seen = expected
    assert any(
        (one.level, one.where) == (level, where) and one.seen.startswith(seen) and one.fix
        for one in judge(world(**facts))
    ), found(world(**facts))


def test_a_broken_link_is_told_once_for_a_pair_of_nodes():
    made = world()
    made.unreachable = {(a, b): "no reply in 4 s" for a in (0, 1) for b in (2, 3)}
    assert found(made) == [
        (
            "fault",
            "node1 to node2",
            "ranks 0, 1 cannot connect to ranks 2, 3 at 10.0.0.2: no reply in 4 s",
        )
    ]


def test_one_reason_of_several_ranks_is_told_once():
    made = world()
    made.group = {0: "refused\ntry this", 2: "refused\ntry this", 3: "late"}
    assert found(made) == [("fault", "ranks 0, 2", "refused"), ("fault", "rank 3", "late")]


def test_the_table_has_a_row_for_each_rank_and_speeds_have_units():
    made = world(r3={"torch": "2.6.0"})
    made.speeds = {("node1", "node2"): (0.00012, 9.4e9), ("node2", "node3"): (0.001, 2e8)}
    assert table(made).splitlines()[-1].endswith("3.11.2  2.6.0*")
    assert speeds(made) == [
        "node1 to node2: 0.12 ms round trip, 9.4 Gbit/s",
        "node2 to node3: 1.00 ms round trip, 200 Mbit/s",
    ]


def test_facts_survive_the_way_through_the_store():
    assert from_json(FIRST.as_json()) == FIRST
