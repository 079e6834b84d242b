import os
import socket
import sys
import threading

import pytest

from ddp_helpers.worker import network

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's tables")


def test_an_answer_that_does_not_come_in_time_is_given_up():
    never = threading.Event()
    with pytest.raises(TimeoutError, match="no answer in 0 s"):
        network.in_time(never.wait, 0.05)
    never.set()


def test_what_comes_in_time_is_returned_or_raised():
    assert network.in_time(lambda: 6 * 7, 5) == 42
    with pytest.raises(ZeroDivisionError):
        network.in_time(lambda: 1 / 0, 5)


def test_localhost_resolves_to_loopback():
    assert network.is_loopback(network.resolve("localhost"))


def test_a_name_that_does_not_exist_raises():
    with pytest.raises(OSError, match=r"."):
        network.resolve("no-such-host.invalid")


@pytest.mark.parametrize(("address", "mine"), [("127.0.0.1", True), ("203.0.113.7", False)])
def test_an_address_is_mine_when_an_interface_has_it(address, mine):
    assert network.is_mine(address) is mine


@pytest.mark.parametrize(
    ("address", "loopback"),
    [("127.0.1.1", True), ("::1", True), ("10.0.0.1", False), ("fe80::1%eth0", False)],
)
def test_loopback_is_recognised(address, loopback):
    assert network.is_loopback(address) is loopback


@linux_only
def test_the_loopback_interface_leads_to_loopback():
    assert ("lo", "127.0.0.1") in network.own_addresses()
    assert network.interface_to("127.0.0.1") == "lo"


@linux_only
def test_every_own_address_is_reached_from_its_own_interface():
    for interface, address in network.own_addresses():
        if ":" not in address:
            assert network.is_mine(address)
            assert network.interface_to(address) == interface


def test_a_held_port_cannot_be_listened_on_and_its_owner_is_named():
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(OSError, match="in use"):
            network.listen("127.0.0.1", port)
        if sys.platform == "linux":
            assert network.port_owner(port).startswith(f"pid {os.getpid()} (")
    network.listen("127.0.0.1", port).close()
    assert network.port_owner(port) is None


@pytest.mark.parametrize(
    ("address", "family"), [("127.0.0.1", socket.AF_INET), ("::1", socket.AF_INET6)]
)
def test_a_listener_has_the_family_of_the_address_alone(address, family):
    # IPv6 and IPv4 in one socket would make torch's store ask DNS about every rank.
    with network.listen(address, 0) as server:
        assert server.family == family


def test_a_free_port_can_be_listened_on():
    network.listen("127.0.0.1", network.free_port()).close()


def test_waiting_for_a_listener_ends_with_the_reason():
    port = network.free_port()
    assert "refused" in network.wait_for_listener("127.0.0.1", port, 0.2)
    with socket.create_server(("127.0.0.1", port)):
        assert network.wait_for_listener("127.0.0.1", port, 5) is None


def test_ranks_of_one_launcher_agree_on_a_port(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("PMIX_NAMESPACE", "prterun-host-1@1")
    network.write_meeting_port(12345)
    assert network.read_meeting_port(0) == 12345
    monkeypatch.setenv("PMIX_NAMESPACE", "prterun-host-2@1")
    with pytest.raises(TimeoutError, match="rank 0 did not write"):
        network.read_meeting_port(0.1)
    monkeypatch.setenv("PMIX_NAMESPACE", "prterun-host-1@1")
    network.remove_meeting_port()
    with pytest.raises(TimeoutError):
        network.read_meeting_port(0)
