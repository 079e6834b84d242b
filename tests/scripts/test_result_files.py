"""--result_dir and --gather_results: each rank writes its file, or rank 0 writes those of all."""

import re

import pytest

from ddp_helpers.launch.commands import Job, plan
from ddp_helpers.launch.hosts import local
from ddp_helpers.launch.runner import run_local
from ddp_helpers.scripts import message_passing, train_resnet

# Each rank in a folder of its own, as on nodes that share none.
IN_EACH_RANK = """
import os
from ddp_helpers.scripts import message_passing, train_resnet
from ddp_helpers.worker.environment import detect
def run(script, folder, *options):
    script.main(["--backend=gloo", *options, f"--result_dir={folder}"])
    script.main(["--backend=gloo", *options, f"--result-dir={folder}_gathered", "--gather-results"])
os.chdir(str(detect().rank))
run(message_passing, "message")
run(train_resnet, "train", "--use_syn", "--image_size=16", "--epochs=1")
"""


def files(folder):
    """The text of each file in folder, without the figures that no second run repeats."""
    changing = '"(images_per_s|memory_mb)": .*'
    return {path.name: re.sub(changing, "", path.read_text()) for path in folder.iterdir()}


@pytest.mark.launcher
@pytest.mark.parametrize("launcher", ["torchrun", "mpirun"])
def test_rank_0_alone_writes_the_files_that_the_ranks_would_write(launcher, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first, second = folders = [tmp_path / "0", tmp_path / "1"]
    for folder in folders:
        folder.mkdir()
    (tmp_path / "script.py").write_text(IN_EACH_RANK)
    run_local(plan(launcher, Job("script.py", hosts=local(2))), timeout_s=200, echo=False)
    for name in ("message", "train"):
        gathered = files(first / f"{name}_gathered")
        assert set(gathered) == {"rank_0.json", "rank_1.json"}
        assert gathered == files(first / name) | files(second / name)
        assert not (second / f"{name}_gathered").exists()


@pytest.mark.parametrize("option", ["--gather_results", "--gather-results"])
@pytest.mark.parametrize("script", [message_passing, train_resnet], ids=lambda one: one.__name__)
def test_to_gather_without_a_folder_ends_with_status_2(script, option, monkeypatch, capsys):
    monkeypatch.setattr(script, "process_group", None)  # nobody is to be met
    with pytest.raises(SystemExit) as caught:
        script.main([option])
    assert caught.value.code == 2
    assert "error: --gather_results needs --result_dir DIR" in capsys.readouterr().err
