import pytest

from ddp_helpers.launch.hosts import Host, HostfileError, local, parse_hosts, read_hostfile

TWO_NODES = (Host("node-a", 2), Host("node-b", 2))


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        pytest.param("node-a:2,node-b:2", TWO_NODES, id="two nodes"),
        pytest.param(" node-a:2 , node-b:2 ", TWO_NODES, id="blanks around"),
        pytest.param("node-a", (Host("node-a", 1),), id="no number is one rank"),
        pytest.param("10.77.0.1:8", (Host("10.77.0.1", 8),), id="address"),
        pytest.param("gpu1.cluster_x.org:4", (Host("gpu1.cluster_x.org", 4),), id="full name"),
    ],
)
def test_a_list_of_hosts_is_read(text, hosts):
    assert parse_hosts(text) == hosts


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("node-a:two", "'node-a:two'"),
        ("node-a:0", "'node-a:0'"),
        ("node-a:-1", "'node-a:-1'"),
        ("node-a:", "'node-a:'"),
        ("node-a:2,", "''"),
        ("", "''"),
        ("node-a node-b", "'node-a node-b'"),
        ("fe80::1:2", "'fe80::1:2'"),
        ("-oProxyCommand=x:2", "'-oProxyCommand=x:2'"),
        ("node-a:2;reboot", "'node-a:2;reboot'"),
    ],
)
def test_a_wrong_part_of_a_list_of_hosts_is_named(text, part):
    with pytest.raises(HostfileError) as caught:
        parse_hosts(text)
    assert str(caught.value) == (
        f"hosts {text!r}: {part} is not NAME:SLOTS with SLOTS >= 1.\nWrite it as: node-a:2,node-b:2"
    )


def test_a_host_that_comes_twice_is_refused_with_the_sum_to_write():
    with pytest.raises(HostfileError, match="node-a comes twice.\nWrite it once: node-a:5$"):
        parse_hosts("node-a:2,node-b:1,node-a:3")


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("node-a slots=2\nnode-b slots=2\n", id="Open MPI"),
        pytest.param("node-a:2\nnode-b:2", id="hydra, no end of line"),
        pytest.param("# two\n\nnode-a  slots=2  # fast\n\tnode-b slots=2\n", id="comments, blanks"),
        pytest.param("node-a slots = 2\r\nnode-b slots =2\r\n", id="spaces around ="),
        pytest.param("node-a slots=2 max_slots=4\nnode-b max-slots=2 slots=2\n", id="max_slots"),
    ],
)
def test_a_hostfile_is_read(tmp_path, text):
    path = tmp_path / "hosts.txt"
    path.write_bytes(text.encode())
    assert read_hostfile(path) == TWO_NODES


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "node-b slots=two",
            "'slots=two' is not slots=N with N >= 1.\nWrite it as: node-b slots=2",
        ),
        ("node-b slots=0", "'slots=0' is not slots=N with N >= 1.\nWrite it as: node-b slots=2"),
        ("node-b slot=2", "'slot=2' is not slots=N with N >= 1.\nWrite it as: node-b slots=2"),
        ("node-b 2", "'2' is not slots=N with N >= 1.\nWrite it as: node-b slots=2"),
        (
            "node-b",
            "'node-b' does not say how many ranks the host runs.\nWrite it as: node-b slots=2",
        ),
        (
            "node-b slots=2 slots=3",
            "'node-b slots=2 slots=3' gives two slot counts.\nWrite it as: node-b slots=2",
        ),
        (
            "node-b:2 slots=3",
            "'node-b:2 slots=3' gives two slot counts.\nWrite it as: node-b slots=2",
        ),
        (
            "node-b:two",
            "'node-b:two' is not a host name, nor NAME:SLOTS with SLOTS >= 1.\n"
            "Write it as: node-a slots=2",
        ),
        (
            "$(reboot) slots=2",
            "'$(reboot)' is not a host name, nor NAME:SLOTS with SLOTS >= 1.\n"
            "Write it as: node-a slots=2",
        ),
    ],
)
def test_a_wrong_line_of_a_hostfile_is_named_with_its_number(tmp_path, line, message):
    path = tmp_path / "hosts.txt"
    path.write_text(f"# nodes\nnode-a slots=2\n{line}\n")
    with pytest.raises(HostfileError) as caught:
        read_hostfile(path)
    assert str(caught.value) == f"{path} line 3: {message}"


def test_a_host_that_comes_twice_in_a_hostfile_is_refused(tmp_path):
    path = tmp_path / "hosts.txt"
    path.write_text("node-a slots=2\nnode-a slots=4\n")
    with pytest.raises(HostfileError, match="node-a comes twice.\nWrite it once: node-a slots=6$"):
        read_hostfile(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"# nothing\n\n", "names no host.\nWrite one host a line: node-a slots=2"),
        (b"\xff\xfe\x00", "is not a text file."),
        (None, "No such file or directory."),
    ],
)
def test_a_hostfile_without_hosts_is_refused(tmp_path, content, message):
    path = tmp_path / "hosts.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(HostfileError) as caught:
        read_hostfile(path)
    assert str(caught.value).endswith(message)
    assert str(path) in str(caught.value)


def test_local_is_one_host_with_all_ranks():
    assert local(4) == (Host("localhost", 4),)
