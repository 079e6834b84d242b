"""What ranks print: whole lines, each with its rank, one rank after the other."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from ddp_helpers.lesson.places import Rank
from ddp_helpers.lesson.rank_text import RankText, label


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


@dataclass
class Folder:
    """Stands in for a keeper."""

    folder: str

    def read(self, file: str, offset: int) -> bytes:
        path = Path(file)
        return path.read_bytes()[offset:] if path.exists() else b""


def test_text_is_shown_as_it_comes_and_ranks_wait_for_their_turn(tmp_path, capsys):
    ranks = [Rank(rank, 100 + rank, None, Folder(str(tmp_path))) for rank in (1, 0)]
    by_rank = {one.rank: one for one in ranks}
    text = RankText(ranks)

    def shown(finished=()) -> str:
        text.show([by_rank[rank] for rank in finished])
        return capsys.readouterr().out

    assert shown() == ""  # no file yet
    Path(by_rank[0].output).write_text("a\nhalf a li")
    Path(by_rank[1].output).write_text("of rank 1")
    assert shown() == "[rank 0] a\n"
    assert shown([1]) == ""  # rank 1 has finished first, and waits
    Path(by_rank[0].output).write_text("a\nhalf a line\nend")
    assert shown([1]) == "[rank 0] half a line\n"
    assert shown([0, 1]) == "[rank 0] end\n[rank 1] of rank 1\n"
    assert shown([0, 1]) == ""
