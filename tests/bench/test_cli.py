"""bench, as it is typed: what starts no rank."""

import json

import pytest

from ddp_helpers.__main__ import main

RECORD = {
    "settings": {"ranks": [1, 2], "strong": False, "arch": "resnet18", "batch_size": 8},
    "rounds": [],
    "parts": {
        "ranks": 2,
        "work": {
            "images": 8,
            "forward_s": 1.0,
            "backward_s": 2.0,
            "other_s": 0.5,
            "buckets": [{"bytes": 100.0, "ready": 1.0}],
            "broadcast_bytes": 0.0,
        },
    },
    "link": {
        "latency_s": 0.0,
        "bytes_per_s": 100.0,
        "busy_bytes_per_s": 50.0,
        "stolen_s_per_byte": 0.001,
    },
}
TYPED = "--images 32 --forward 60ms --backward 125ms --gradients 100mb --rate 12.8gbit"


def rows(printed: str) -> dict[str, list[str]]:
    """Return the cells of the lines that begin with a number, by that number."""
    lines = [line.split() for line in printed.splitlines()]
    return {cells[0]: cells[1:] for cells in lines if cells and cells[0].isdecimal()}


@pytest.fixture
def record(tmp_path):
    path = tmp_path / "run.json"
    path.write_text(json.dumps(RECORD))
    return str(path)


def test_a_prediction_from_typed_numbers(capsys):
    assert main(["bench", "predict", *TYPED.split(), "--ranks", "1,4096"]) == 0
    printed = capsys.readouterr().out
    assert rows(printed)["1"] == ["185.0", "ms", "173", "1.00"]
    assert "can hide the exchange from 12.8 Gbit/s on" in printed


def test_a_prediction_from_a_measurement_and_on_another_network(record, capsys):
    assert main(["bench", "predict", record, "--ranks", "1,2"]) == 0
    assert rows(capsys.readouterr().out)["2"][0] == "4500.0"  # all sent after the backward, 1 s
    assert main(["bench", "predict", record, "--rate", "0.4kbit", "--ranks", "2"]) == 0
    assert rows(capsys.readouterr().out)["2"][0] == "5500.0"  # 50 bytes/s: 2 s
    on_one_node = ["--rate", "0.4kbit", "--ranks_per_node", "2", "--ranks", "2,4"]
    assert main(["bench", "predict", record, *on_one_node]) == 0
    found = rows(capsys.readouterr().out)
    assert (found["2"][0], found["4"][0]) == ("4500.0", "6500.0")
    assert main(["bench", "predict", record, "--accumulate", "2", "--ranks", "2"]) == 0
    assert rows(capsys.readouterr().out)["2"][0] == "7500.0"
    assert main(["bench", "predict", record, "--compress", "2", "--ranks", "2"]) == 0
    assert rows(capsys.readouterr().out)["2"][0] == "4000.0"


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("predict", "--images, --forward, --backward, --gradients, --rate missing"),
        ("predict no.json", "no.json does not exist"),
        ("predict RECORD --images 3", "--images is in"),
    ],
)
def test_numbers_that_are_missing_or_come_twice_are_named(record, capsys, typed, message):
    assert main(["bench", *typed.replace("RECORD", record).split()]) == 2
    assert message in capsys.readouterr().err


def test_a_record_without_a_link_cannot_predict(record, tmp_path, capsys):
    (tmp_path / "run.json").write_text(json.dumps({"settings": {}}))
    assert main(["bench", "predict", record]) == 2
    assert "holds no link" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("predict --rate 10", "'10', expected a number and one of kbit, mbit, gbit"),
        ("predict --forward 3m", "expected a number and one of s, ms, us"),
        ("predict --ranks 0,2", "expected numbers of ranks such as 1,8,256"),
        ("train --ranks one", "expected numbers of ranks such as 1,8,256"),
        ("train --rounds 4", "expected a whole number, 5 or more"),
        ("allreduce --sizes 3", "expected bytes such as 4k or 16m"),
        ("allreduce --sizes 4g", "expected bytes such as 4k or 16m"),
        ("", "WHAT"),
    ],
)
def test_what_cannot_be_measured_is_refused_as_it_is_typed(capsys, typed, message):
    with pytest.raises(SystemExit) as ended:
        main(["bench", *typed.split()])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
