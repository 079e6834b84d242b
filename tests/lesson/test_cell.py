"""How a cell that failed is shown. Cells on real ranks are in test_engines.py."""

from ddp_helpers.lesson.cell import RanksFailed


def test_a_failure_shows_its_text_and_not_our_call_stack():
    failure = RanksFailed("rank 0 raised X\n    line 1", {0: "full traceback"})
    assert failure._render_traceback_() == ["RanksFailed: rank 0 raised X", "    line 1"]
    assert failure.tracebacks == {0: "full traceback"}
