"""Where a rank is, read from the stack its faulthandler writes."""

from ddp_helpers.lesson.places import parse_stack

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
