"""bench tune: which options it takes for the best command, and one real round."""

import pytest

from ddp_helpers.__main__ import main
from ddp_helpers.bench.tune import OPTIONS, best_of
from ddp_helpers.scripts import train_resnet


def runs(**ratios):
    """Return runs of --NAME=... options with these ratios in three rounds."""
    return {
        f"--{name}": [{"ratio": one} for one in (ratio - 0.1, ratio, ratio + 0.2)]
        for name, ratio in ratios.items()
    }


def test_what_helps_is_taken_and_the_best_of_one_option():
    found = runs(static_graph=1.01, channels_last=1.2)
    found |= {"--compress=fp16": [{"ratio": 1.5}], "--compress=bf16": [{"ratio": 1.7}]}
    found |= {"--compile": [{"error": "no compiler"}]}
    assert best_of(found, list(found)) == ["--channels_last", "--compress=bf16"]


def test_every_option_is_one_of_train_resnet():
    for option in OPTIONS:
        assert train_resnet.parse(option.words.split())


@pytest.mark.launcher
def test_one_option_beside_none(capsys, tmp_path):
    """One good option, and one that the job refuses."""
    words = ["--rounds", "1", "--only", "channels_last,amp=fp16", "--out", f"{tmp_path}/t.json"]
    small = ["--image_size", "16", "--batch_size", "64", "--epochs", "1"]
    assert main(["bench", "tune", "-n", "1", *words, "--", *small]) == 0
    printed = capsys.readouterr().out
    lines = printed.splitlines()
    assert [line.split()[0] for line in lines[1:4]] != []
    row = next(line for line in lines if line.startswith("--channels_last"))
    assert float(row.split()[1]) > 0
    assert float(row.split()[5]) > 50  # MB
    refused = next(line for line in lines if line.startswith("--amp=fp16"))
    assert "--amp fp16 crawls on a CPU" in refused
    assert f"--run -m {train_resnet.__name__} {' '.join(small)}" in lines[-1]
