"""The file of a bench: continued by the same bench, kept from another one."""

import json

import pytest

from ddp_helpers.bench.record import RecordError, load_record, read_record, write_record


def test_the_same_bench_goes_on_with_what_it_has_written(tmp_path):
    path = tmp_path / "new folder" / "run.json"
    record = read_record(path, {"ranks": [1, 2]})
    assert record == {"settings": {"ranks": [1, 2]}}
    record["rounds"] = [3]
    write_record(path, record)
    assert read_record(path, {"ranks": [1, 2]})["rounds"] == [3]
    assert [one.name for one in path.parent.iterdir()] == ["run.json"]  # no half-written file


def test_another_bench_does_not_write_over_it(tmp_path):
    path = tmp_path / "run.json"
    write_record(path, {"settings": {"ranks": [1, 2], "arch": "resnet18"}})
    with pytest.raises(RecordError, match=r"with arch 'resnet18', this one has 'resnet50'"):
        read_record(path, {"ranks": [1, 2], "arch": "resnet50"})


def test_without_a_file_nothing_is_read_or_written():
    assert read_record(None, {"a": 1}) == {"settings": {"a": 1}}
    write_record(None, {"settings": {}})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "does not exist"),
        (b"", "is no file of a bench"),
        (b"\xff\x00", "is no file of a bench"),
        (json.dumps({"rounds": []}).encode(), "it has no settings"),
        (b"[1]", "it has no settings"),
    ],
)
def test_what_is_no_record_is_refused(tmp_path, content, message):
    path = tmp_path / "run.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(RecordError, match=message):
        load_record(path)
