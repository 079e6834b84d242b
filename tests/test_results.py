import json

import pytest

from ddp_helpers.results import ResultsError, read_results, write_result


def test_results_are_read_in_rank_order(tmp_path):
    for rank in (10, 2, *range(3, 10), 0, 1):
        write_result(tmp_path, rank, world_size=11, number=rank * 1.5)
    results = read_results(tmp_path)
    assert [result["rank"] for result in results] == list(range(11))
    assert results[10] == {"rank": 10, "world_size": 11, "number": 15.0}


def test_a_file_is_whole_and_nothing_else_is_left(tmp_path):
    path = write_result(tmp_path / "new" / "folder", 3, launcher="torchrun")
    assert json.loads(path.read_text()) == {"rank": 3, "launcher": "torchrun"}
    assert [file.name for file in path.parent.iterdir()] == ["rank_3.json"]


def test_a_missing_rank_is_named(tmp_path):
    for rank in (0, 2):
        write_result(tmp_path, rank, world_size=3)
    with pytest.raises(ResultsError, match=r"ranks \[0, 2\], expected \[0, 1, 2\]"):
        read_results(tmp_path)


def test_results_of_two_jobs_are_not_mixed(tmp_path):
    for rank in range(4):
        write_result(tmp_path, rank, world_size=4)
    for rank in range(2):
        write_result(tmp_path, rank, world_size=2)
    with pytest.raises(ResultsError, match="jobs of 2 and 4 ranks"):
        read_results(tmp_path)


def test_an_empty_folder_is_no_result(tmp_path):
    with pytest.raises(ResultsError, match=r"ranks \[\], expected \[0\]"):
        read_results(tmp_path)
