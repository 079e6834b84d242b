"""Ranks reach each other over plain TCP; what cannot be reached is named with the reason."""

import itertools
import socket

import pytest

from ddp_helpers.doctor import links


def test_a_listener_says_whose_it_is_and_one_that_has_closed_refuses():
    with links.Listener(3, "127.0.0.1") as listener:
        assert links.reach({3: listener.place}) == {3: ""}
    assert links.reach({3: listener.place}) == {3: "connection refused"}


def test_somebody_else_at_the_place_is_told():
    with links.Listener(3, "127.0.0.1") as listener:
        assert links.reach({4: listener.place}) == {4: "something else answers there: 'rank 3'"}


def test_a_place_that_drops_packets_is_given_up_in_time(monkeypatch):
    monkeypatch.setattr(links, "CONNECT_S", 0.5)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        # Linux drops what comes to a full queue: two connections fill one of length 0.
        waiting = [socket.socket() for _ in range(4)]
        for one in waiting:
            one.setblocking(False)
            one.connect_ex(full.getsockname())
        assert links.reach({1: full.getsockname()}) == {1: "no reply in 0.5 s"}
        for one in waiting:
            one.close()


def test_nobody_to_reach_is_no_error():
    assert links.reach({}) == {}


def test_round_trip_and_rate_are_measured():
    with links.Listener(0, "127.0.0.1") as listener:
        round_trip, rate = links.measure(listener.place)
    assert 0 < round_trip < 0.1
    assert rate > 1e7  # bits per second: loopback has thousands of times as many


@pytest.mark.parametrize("count", [2, 3, 4, 5, 8])
def test_every_pair_of_nodes_has_its_round_and_no_node_two_at_once(count):
    nodes = [f"node{n}" for n in range(count)]
    rounds = links.rounds(nodes)
    pairs = [frozenset(pair) for one in rounds for pair in one]
    assert sorted(map(sorted, pairs)) == sorted(map(sorted, itertools.combinations(nodes, 2)))
    for one in rounds:
        busy = [node for pair in one for node in pair]
        assert len(busy) == len(set(busy))
