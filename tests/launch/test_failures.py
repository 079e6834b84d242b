"""The first failure is found in output as the launchers really wrote it."""

import pytest

from ddp_helpers.launch.failures import Failure, first_failure
from ddp_helpers.launch.output import Line

ROOT = """\
Traceback (most recent call last):
  File "train.py", line 7, in <module>
    step(batch)
  File "train.py", line 3, in step
    raise ValueError("bad batch")
ValueError: bad batch
two lines"""

LOST = """\
Traceback (most recent call last):
  File "train.py", line 9, in <module>
    dist.all_reduce(loss)
RuntimeError: [gloo/transport/tcp/pair.cc:525] Connection closed by peer [127.0.0.1]:4242"""

CHAINED = """\
Traceback (most recent call last):
  File "train.py", line 2, in <module>
    settings["lr"]
KeyError: 'lr'

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "train.py", line 4, in <module>
    raise ValueError("no lr") from error
ValueError: no lr"""

TORCHRUN_SUMMARY = """\
W1130 18:31:20.150000 5168 torch/distributed/elastic/multiprocessing/api.py:1028] Sending SIGTERM
E1130 18:31:20.181000 5168 torch/distributed/elastic/multiprocessing/api.py:1002] failed
Traceback (most recent call last):
  File "/env/torch/distributed/launcher/api.py", line 386, in launch_agent
    raise ChildFailedError(
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
train.py FAILED
------------------------------------------------------------
Failures:
[1]:
  time      : 2026-11-30_18:31:20
  host      : localhost
  rank      : {other} (local_rank: {other_local})
  exitcode  : {other_code} (pid: 5175)
  error_file: <N/A>
  traceback : To enable traceback see: https://pytorch.org
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-30_18:31:20
  host      : localhost
  rank      : {rank} (local_rank: {local})
  exitcode  : {code} (pid: 5174)
  error_file: <N/A>
============================================================"""

OPEN_MPI_EXIT = """\
--------------------------------------------------------------------------
prterun detected that one or more processes exited with non-zero status,
thus causing the job to be terminated. The first process to do so was:

   Process name: [prterun-vm-5087@1,{rank}]
   Exit code:    {code}
--------------------------------------------------------------------------"""

OPEN_MPI_4_EXIT = """\
orterun detected that one or more processes exited with non-zero status, thus causing
the job to be terminated. The first process to do so was:

  Process name: [[30450,1],1]
  Exit code:    3
--------------------------------------------------------------------------"""

OPEN_MPI_KILLED = """\
--------------------------------------------------------------------------
prterun noticed that process rank 1 with PID 7582 on node vm exited on
signal 11 (Segmentation fault).
--------------------------------------------------------------------------"""

OPEN_MPI_4_KILLED = """\
--------------------------------------------------------------------------
orterun noticed that process rank 1 with PID 0 on node vm exited on signal 11 (Segmentation fault).
--------------------------------------------------------------------------"""


def summary(rank, code, other, other_code, local=None, other_local=None):
    return TORCHRUN_SUMMARY.format(
        rank=rank,
        code=code,
        local=rank if local is None else local,
        other=other,
        other_code=other_code,
        other_local=other if other_local is None else other_local,
    )


def lines(*parts, command=0):
    """Return the lines of (label, text) parts."""
    return [Line(text, command, label) for label, part in parts for text in part.split("\n")]


def interleaved(*parts):
    """Return the parts' lines, one of each in turn."""
    columns = [lines(part) for part in parts]
    longest = max(map(len, columns))
    return [column[row] for row in range(longest) for column in columns if row < len(column)]


def ranks(label):
    return [(label.format(0), LOST), (label.format(1), ROOT), (label.format(2), LOST)]


@pytest.mark.parametrize(
    ("label", "end"),
    [
        pytest.param("[default{}]", summary(rank=0, code=1, other=1, other_code=1), id="torchrun"),
        pytest.param("[1,{}]<stderr>", OPEN_MPI_EXIT.format(rank=0, code=1), id="Open MPI"),
    ],
)
def test_interleaved_tracebacks_give_the_one_that_is_no_lost_connection(label, end):
    # The launcher blames rank 0, whose traceback also comes first.
    expected_code = 1 if label.startswith("[default") else None
    failure = first_failure(interleaved(*ranks(label)) + lines(("", end)))
    assert failure == Failure(1, expected_code, ROOT, 0)


def test_tracebacks_that_torch_marks_are_taken_apart_without_labels():
    marked = [
        ("", "\n".join(f"[rank{rank}]: {text}" for text in traceback.split("\n")))
        for rank, (_, traceback) in enumerate(ranks("{}"))
    ]
    assert first_failure(interleaved(*marked)) == Failure(1, None, ROOT, 0)


def test_chained_tracebacks_are_kept_together():
    noise = "[W1130 18:31:20 ProcessGroup.cpp:1] destroy_process_group was not called"
    after = lines(("[default1]", f"starting\n{CHAINED}\n{noise}"))
    assert first_failure(after).text == CHAINED


NAMED = "error: rank 1 on node2 (pid 7) failed first: {} (train.py line 3)"


def test_a_rank_that_ended_silently_is_taken_from_what_another_says_of_it():
    said = NAMED.format("SystemExit: 0")
    output = lines(("[default0]", said), ("", summary(rank=0, code=1, other=2, other_code=1)))
    assert first_failure(output) == Failure(1, None, said, 0)


def test_a_rank_that_speaks_for_itself_comes_before_what_another_says_of_it():
    output = lines(("[default0]", NAMED.format("ValueError: bad batch")), ("[default1]", ROOT))
    assert first_failure(output) == Failure(1, None, ROOT, 0)


def test_lost_connections_are_reported_when_there_is_nothing_else():
    failure = first_failure(lines(("[default2]", LOST), ("[default0]", LOST)))
    assert failure == Failure(2, None, LOST, 0)


def test_a_rank_ended_by_a_signal_comes_before_the_lost_connections():
    output = lines(
        ("[default0]", LOST),
        ("[default1]", "last words"),
        ("", summary(rank=0, code=1, other=1, other_code=-9)),
    )
    assert first_failure(output) == Failure(1, -9, "last words", 0)


@pytest.mark.parametrize("end", [OPEN_MPI_KILLED, OPEN_MPI_4_KILLED])
def test_a_signal_is_read_from_what_open_mpi_says(end):
    output = lines(("[1,1]<stdout>", "last words"), ("[1,0]<stdout>", "other"), ("", end))
    assert first_failure(output) == Failure(1, -11, "last words", 0)


@pytest.mark.parametrize(
    "end",
    [
        summary(rank=1, code=3, other=0, other_code=-15),
        OPEN_MPI_EXIT.format(rank=1, code=3),
        OPEN_MPI_4_EXIT,
    ],
)
def test_an_exit_code_without_a_traceback_comes_with_the_last_lines(end):
    failure = first_failure(lines(("", f"one\n\ntwo\n{end}")))
    assert (failure.rank, failure.exit_code) == (1, 3)
    assert failure.text.startswith("one\ntwo")
    assert "Sending" not in failure.text


@pytest.mark.parametrize(
    "text",
    [
        "error: MASTER_PORT=99999, expected a port number.\nIt was set by hand.",
        "train.py: error: unrecognized arguments: --local-rank=1",
        "/env/bin/python: can't open file '/tmp/none.py': [Errno 2] No such file or directory",
        "/env/bin/python3.11: No module named nowhere",
    ],
)
def test_a_short_error_counts_like_a_traceback(text):
    output = lines(("[1,0]<stderr>", LOST), ("[1,1]<stderr>", f"usage: x\n{text}"))
    assert first_failure(output) == Failure(1, None, text, 0)


def test_what_ranks_print_to_stdout_is_no_error_message():
    output = lines(("[1,0]<stdout>", "error: 0.25"), ("[1,1]<stderr>", ROOT))
    assert first_failure(output).text == ROOT


def test_a_traceback_of_the_launcher_itself_is_reported_without_a_rank():
    own = LOST.replace("Connection closed by peer", "the server socket has failed to listen")
    assert first_failure(lines(("", own))) == Failure(None, None, own, 0)


def test_with_several_agents_the_summary_tells_the_rank_of_a_local_rank():
    first = lines(("", "fine"), command=0)
    second = lines(
        ("[default1]", ROOT),
        ("", summary(rank=3, local=1, code=1, other=2, other_local=0, other_code=-15)),
        command=1,
    )
    assert first_failure(first + second) == Failure(3, 1, ROOT, 1)


def test_how_torchrun_takes_being_stopped_is_no_failure():
    stopped = """\
Traceback (most recent call last):
  File "/env/torch/distributed/elastic/multiprocessing/api.py", line 1, in _terminate
    raise SignalException("...")
torch.distributed.elastic.multiprocessing.api.SignalException: Process 1 got signal: 15"""
    assert first_failure(lines(("", f"one\ntwo\n{stopped}"))).rank is None
    assert first_failure(lines(("", stopped), ("[default1]", ROOT))).text == ROOT


def test_a_program_that_is_not_there_is_told_before_the_last_lines():
    missing = "bash: line 1: /opt/ddp/bin/prted: No such file or directory"
    explained = [f"it may also be reason {number}" for number in range(20)]
    output = [Line(text, 0) for text in ("started", missing, *explained)]
    assert first_failure(output).text.splitlines() == [missing, *explained[-10:]]


def test_no_output_gives_no_text():
    assert first_failure([]) == Failure(None, None, "")
