"""The parts of running a cell that need no ranks."""

import pytest

from ddp_helpers.lesson.cell import RanksFailed, label, parse_stack


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param("", "", id="nothing"),
        pytest.param("a\nb\n", "[rank 1] a\n[rank 1] b\n", id="lines"),
        pytest.param("a", "[rank 1] a\n", id="no newline at the end"),
        pytest.param("a\n\nb", "[rank 1] a\n[rank 1]\n[rank 1] b\n", id="an empty line"),
        pytest.param("[rank 1] a\n", "[rank 1] a\n", id="labelled by the rank itself"),
        pytest.param("[rank 2] a\n", "[rank 1] [rank 2] a\n", id="labelled for another rank"),
        pytest.param("10 %\r 50 %\r100 %\n", "[rank 1] 100 %\n", id="a progress bar"),
        pytest.param("a\r\nb", "[rank 1] a\n[rank 1] b\n", id="lines of Windows"),
    ],
)
def test_every_line_says_its_rank_once(text, expected):
    assert label(1, text) == expected


DUMP = """\
Thread 0x00007f1 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 327 in wait
  File "/usr/lib/python3.11/threading.py", line 982 in run

Current thread 0x00007f2 (most recent call first):
  File "/x/site-packages/torch/distributed/distributed_c10d.py", line 2500 in recv
  File "<px 2>", line 3 in receive
  File "<px 4>", line 5 in <module>
  File "/x/ddp_helpers/lesson/in_rank.py", line 90 in _execute
  File "/x/ddp_helpers/lesson/in_rank.py", line 60 in run_cell
  File "/x/site-packages/ipyparallel/engine/kernel.py", line 130 in do_apply
"""


def test_a_stack_is_read_from_the_thread_that_runs_the_cell_outermost_first():
    assert parse_stack(DUMP) == (
        ("<px 4>", 5, "<module>"),
        ("<px 2>", 3, "receive"),
        ("/x/site-packages/torch/distributed/distributed_c10d.py", 2500, "recv"),
    )


def test_a_stack_without_a_cell_gives_no_places():
    assert parse_stack(DUMP.replace("in_rank", "other")) == ()


def test_a_failure_shows_its_text_and_not_our_call_stack():
    failure = RanksFailed("rank 0 raised X\n    line 1", {0: "full traceback"})
    assert failure._render_traceback_() == ["RanksFailed: rank 0 raised X", "    line 1"]
    assert failure.tracebacks == {0: "full traceback"}
