import pytest

from ddp_helpers.launch.commands import HostCommand
from ddp_helpers.launch.mpi import Mpi
from ddp_helpers.launch.output import Line, LineReader, with_labels

TORCHRUN = HostCommand("localhost", ("python", "-m", "torch.distributed.run", "train.py"))
OPEN_MPI_5 = HostCommand("localhost", ("mpirun", "train.py"), (), Mpi("Open MPI", (5, 0, 11), ""))
OPEN_MPI_4 = HostCommand("localhost", ("mpirun", "train.py"), (), Mpi("Open MPI", (4, 1, 4), ""))
MPICH = HostCommand("localhost", ("mpirun", "train.py"), (), Mpi("MPICH", (4, 0, 2), ""))


def read(command, *pieces):
    reader = LineReader(command, 0)
    lines = [line for piece in pieces for line in reader.feed(piece)] + reader.end()
    return [(line.local_rank, line.text) for line in lines]


@pytest.mark.parametrize(
    ("command", "data", "expected"),
    [
        pytest.param(
            OPEN_MPI_5,
            b"[1,1]<stdout>:   indented\n[1,0]<stderr>: \nprterun says\n",
            [(1, "  indented"), (0, ""), (None, "prterun says")],
            id="Open MPI 5",
        ),
        pytest.param(
            OPEN_MPI_4,
            b"[1,1]<stdout>:  indented\n[1,0]<stderr>:\n[0,0]<stderr>:the daemon\n",
            [(1, "  indented"), (0, ""), (None, "the daemon")],
            id="Open MPI 4",
        ),
        pytest.param(
            OPEN_MPI_4,
            b"[1,0]<stdout>:pa[1,1]<stdout>:whole\n[1,0]<stderr>:apart\n[1,0]<stdout>:rt\n",
            [(1, "whole"), (0, "apart"), (0, "part")],
            id="lines in pieces",
        ),
        pytest.param(
            OPEN_MPI_4,
            b"[1,0]<stdout>:hello[1,0]<stdout>:\n",
            [(0, "hello")],
            id="end of line in a piece of its own",
        ),
        pytest.param(
            OPEN_MPI_5,
            b"[1,0]<stdout>: no end[1,1]<stdout>: nor here",
            [(1, "nor here"), (0, "no end")],
            id="no end of line",
        ),
        pytest.param(
            TORCHRUN,
            b"out of any rank\n[default1]:ValueError: x\n[default0]:\n",
            [(None, "out of any rank"), (1, "ValueError: x"), (0, "")],
            id="torchrun",
        ),
        pytest.param(MPICH, b"[1,1]<stdout>: x\n", [(None, "[1,1]<stdout>: x")], id="no labels"),
        pytest.param(TORCHRUN, b"caf\xc3\xa9 \xff\r\n", [(None, "café \ufffd")], id="odd bytes"),
        pytest.param(TORCHRUN, b"", [], id="nothing"),
    ],
)
def test_lines_are_whole_and_know_their_rank(command, data, expected):
    assert read(command, data) == expected
    assert read(command, *(data[i : i + 1] for i in range(len(data)))) == expected  # byte by byte


def test_a_line_knows_its_command_and_stream():
    (line,) = LineReader(OPEN_MPI_5, 3).feed(b"[1,2]<stderr>: x\n")
    assert line == Line("x", 3, "[1,2]<stderr>")


def test_only_open_mpi_is_asked_for_labels_by_an_option():
    assert with_labels(OPEN_MPI_5) == ("mpirun", "--tag-output", "train.py")
    assert with_labels(OPEN_MPI_4) == ("mpirun", "--tag-output", "train.py")
    assert with_labels(MPICH) == MPICH.argv
    assert with_labels(TORCHRUN) == TORCHRUN.argv
