import errno
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from ddp_helpers.worker.checkpoint import CheckpointError
from ddp_helpers.worker.rotation import found, load_newest, path_of, refuse_used, save_next


def linear(value):
    model = nn.Linear(3, 2)
    nn.init.constant_(model.weight, value)
    return model


def value_of(model):
    return model.weight[0, 0].item()


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def loaded(folder, **options):
    """Return the position, the value of the model, and what was said."""
    said, model = [], linear(0)
    position = load_newest(folder, model, say=said.append, **options)
    return position, value_of(model), said


def test_the_newest_files_are_kept_and_the_newest_of_all_is_loaded(tmp_path):
    places = [(0, 900), (1, 0), (1, 10), (2, 0), (10, 0)]
    for value, (epoch, step) in enumerate(places, 1):
        assert save_next(tmp_path, 3, linear(value), epoch=epoch, step=step).exists()
    assert found(tmp_path) == [path_of(tmp_path, *place) for place in places[:1:-1]]
    position, value, said = loaded(tmp_path)
    assert (position.epoch, position.step, value) == (10, 0, 5)
    assert said == [f"continuing {path_of(tmp_path, 10, 0)} with epoch 11"]


def test_what_this_rank_gave_comes_back_with_the_step(tmp_path):
    layout = {"batch_size": 32}
    mine = {"totals": [1.5, 2.0], "text": "x"}
    save_next(tmp_path, 3, linear(1), epoch=1, step=7, mine=mine, layout=layout)
    position, _, said = loaded(tmp_path, layout=layout)
    assert (position.epoch, position.step, position.mine) == (1, 7, mine)
    assert said == [f"continuing {path_of(tmp_path, 1, 7)} with epoch 2, step 8"]


def test_with_another_layout_the_epoch_begins_anew_and_one_line_says_so(tmp_path):
    save_next(tmp_path, 3, linear(1), epoch=1, step=7, mine=1, layout={"batch_size": 32})
    position, value, said = loaded(tmp_path, layout={"batch_size": 16})
    assert (position.epoch, position.step, position.mine, value) == (1, 0, None, 1)
    (line,) = said
    assert line.endswith("with epoch 2, from its start (batch_size 32 then, 16 now)")


def test_at_the_start_of_an_epoch_another_layout_is_no_news(tmp_path):
    save_next(tmp_path, 3, linear(1), epoch=1, layout={"batch_size": 32})
    position, _, (line,) = loaded(tmp_path, layout={"batch_size": 16})
    assert (position.epoch, position.note) == (1, "")
    assert line.endswith("with epoch 2")


def test_a_run_that_went_back_removes_what_it_had_left_behind(tmp_path):
    for step in (10, 20, 30):
        save_next(tmp_path, 3, linear(step), epoch=0, step=step)
    save_next(tmp_path, 3, linear(15), epoch=0, step=15)
    assert found(tmp_path) == [path_of(tmp_path, 0, step) for step in (15, 10)]


def cut_in_half(path):
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])


def zeroed_page(path):
    whole = path.read_bytes()
    at = whole.index(linear(2).weight.detach().numpy().tobytes())
    path.write_bytes(whole[:at] + bytes(24) + whole[at + 24 :])


@pytest.mark.parametrize("damage", [cut_in_half, zeroed_page, lambda path: path.write_bytes(b"")])
def test_a_damaged_newest_file_gives_way_to_the_one_before_and_is_named(damage, tmp_path):
    for value in (1, 2):
        save_next(tmp_path, 3, linear(value), epoch=value)
    damage(path_of(tmp_path, 2, 0))
    position, value, said = loaded(tmp_path)
    assert (position.epoch, value) == (1, 1)
    assert said[0].startswith(f"{path_of(tmp_path, 2, 0)} is damaged")
    assert said[0].endswith("; trying the one before it")
    assert said[1] == f"continuing {path_of(tmp_path, 1, 0)} with epoch 2"


def test_when_all_are_damaged_nothing_is_started_anew(tmp_path):
    for value in (1, 2):
        save_next(tmp_path, 3, linear(value), epoch=value)
        cut_in_half(path_of(tmp_path, value, 0))
    with pytest.raises(CheckpointError, match="is damaged"):
        loaded(tmp_path)


def test_a_file_of_another_model_is_refused_and_no_older_one_taken(tmp_path):
    save_next(tmp_path, 3, linear(1), epoch=1)
    save_next(tmp_path, 3, nn.Linear(4, 2), epoch=2)
    with pytest.raises(CheckpointError, match="e0002_s000000.pt is of another model"):
        loaded(tmp_path)


def test_a_file_of_an_earlier_version_is_refused_with_what_to_do(tmp_path):
    old = {"model": linear(1).state_dict(), "epoch": 1, "random_states": [{}]}
    torch.save(old, tmp_path / "checkpoint.pt")
    with pytest.raises(CheckpointError, match="checkpoint.pt was written by an older version"):
        loaded(tmp_path)
    with pytest.raises(CheckpointError, match="checkpoint.pt is of an earlier run"):
        refuse_used(tmp_path)


def test_an_empty_and_a_missing_folder_hold_no_run(tmp_path):
    for folder in (tmp_path, tmp_path / "none"):
        assert loaded(folder) == (None, 0, [])
        refuse_used(folder)


def test_other_files_of_the_folder_are_left_alone(tmp_path):
    others = ["best.pt", "checkpoint_e1.pt", "checkpoint_of_mine.pt", "notes.txt"]
    for name in others:
        (tmp_path / name).write_text("")
    for epoch in range(1, 4):
        save_next(tmp_path, 1, linear(epoch), epoch=epoch)
    assert names(tmp_path) == sorted([*others, "checkpoint_e0003_s000000.pt"])


@pytest.mark.parametrize("bytes_left", [0, 100, 5_000, 900_000])
def test_a_full_disk_is_named_in_one_line_and_the_older_checkpoint_stays(tmp_path, bytes_left):
    model = nn.Linear(500, 500)  # 1 MB
    save_next(tmp_path, 3, model, epoch=1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_left, before[1]))  # of any file
    try:
        with pytest.raises(CheckpointError) as caught:
            save_next(tmp_path, 3, model, epoch=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    path = path_of(tmp_path, 2, 0)
    reason = os.strerror(errno.EFBIG)
    assert str(caught.value) == f"{path} could not be written: [Errno {errno.EFBIG}] {reason}"
    assert names(tmp_path) == [path_of(tmp_path, 1, 0).name]
    assert load_newest(tmp_path, model).epoch == 1


@pytest.mark.launcher
def test_after_each_of_100_sigkills_every_file_loads_and_the_run_goes_on(tmp_path):
    script = Path(__file__).parent / "rank_scripts" / "killed_while_saving.py"
    done = subprocess.run(
        [sys.executable, script, tmp_path / "run", "100", "1"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    resumed, uninterrupted, _ = done.stdout.splitlines()
    assert resumed == uninterrupted
