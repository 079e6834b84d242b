"""The training script, as a user types it."""

import re

import pytest
import torch

from ddp_helpers.launch.runner import launch_here
from ddp_helpers.results import read_results
from ddp_helpers.scripts import train_resnet

pytest.importorskip("sklearn.datasets")  # here, because it sets variables when first imported

MODULE = train_resnet.__name__
QUICK = ("--use_syn", "--image_size", "16", "--epochs", "1")
FIELDS = {
    *("rank", "local_rank", "world_size", "launcher", "host", "backend"),
    *("loss", "accuracy", "images_per_s", "memory_mb", "parameters"),
}
LINE = re.compile(
    r"epoch (\d)/(\d)  loss \d+\.\d{4}  accuracy [01]\.\d{4}  test accuracy [01]\.\d{4}"
    r"  \d+ images/s"
)


@pytest.fixture
def threads():
    """Put back what main sets for its process."""
    before = torch.get_num_threads()
    yield
    torch.set_flush_denormal(False)
    torch.set_num_threads(before)


def options():
    return [
        name for action in train_resnet.build_parser()._actions for name in action.option_strings
    ]


def test_every_option_has_a_dashed_spelling():
    for name in options():
        assert "--" + name[2:].replace("_", "-") in options() or name == "-h"


def test_the_sources_options_work_as_typed_there():
    typed = "--backend=nccl --use_syn --batch_size=8192 --arch=resnet152"
    args = train_resnet.parse(typed.split())
    assert (args.backend, args.data) == ("nccl", "synthetic")
    assert (args.batch_size, args.arch) == (8192, "resnet152")


@pytest.mark.launcher
def test_powersgd_trains_equal_replicas(tmp_path):
    """Compressed from step 11 on: in gloo's threads, exchanges of two buckets would cross."""
    options = ("--image_size", "16", "--epochs", "1", "--compress", "powersgd")
    results = launch_here("torchrun", MODULE, *options, result_dir=tmp_path)
    assert len({one["parameters"] for one in results}) == 1


@pytest.mark.parametrize("name", ["--local_rank=1", "--local-rank=1"])
def test_B05_what_torch_distributed_launch_adds_is_accepted(name):
    """--local-rank is not known.

    https://github.com/huggingface/pytorch-image-models/issues/1724
    """
    assert train_resnet.parse([name]).epochs == train_resnet.parse([]).epochs


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("--batch_size 0", "--batch_size 0, expected a number above 0"),
        ("--batch-size -3", "--batch_size -3, expected a number above 0"),
        ("--epochs 0", "--epochs 0, expected a number above 0"),
        ("--lr nan", "--lr nan, expected a number above 0"),
        ("--lr inf", "--lr inf, expected a number above 0"),
        ("--accumulate 0", "--accumulate 0, expected a number above 0"),
        ("--timeout 0", "--timeout 0.0, expected a number above 0"),
        ("--batch_size 1", "--batch_size 1 needs --image_size 33 or more"),
        ("--resume", "--resume needs --save DIR"),
        ("--save_every 5", "--save_every needs --save DIR"),
        ("--save . --save-every 0", "--save_every 0, expected a number above 0"),
        ("--keep 0", "--keep 0, expected a number above 0"),
        ("--batch_size two", "invalid int value: 'two'"),
        ("--data mnist", "invalid choice: 'mnist'"),
        ("--arch resnet19", "invalid choice: 'resnet19'"),
    ],
)
def test_a_value_that_cannot_work_ends_with_status_2(typed, message, capsys):
    with pytest.raises(SystemExit) as caught:
        train_resnet.main(typed.split())
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(
    ("typed", "message"),
    [("--sync_bn", "SyncBatchNorm runs on GPUs only"), ("--amp fp16", "take --amp bf16")],
)
def test_what_a_cpu_cannot_do_is_said_before_training(typed, message, capsys):
    with pytest.raises(SystemExit) as caught:
        train_resnet.main(["--backend", "gloo", *QUICK, *typed.split()])
    assert caught.value.code == 1
    assert message in capsys.readouterr().err


def test_the_learning_rate_rises_for_one_epoch_and_then_falls():
    factors = [train_resnet.lr_factor(4, step) for step in range(12)]
    assert factors[:4] == [0.25, 0.5, 0.75, 1.0]
    assert factors[7] == 0.5
    assert factors[11] == pytest.approx(1 / 3)


@pytest.mark.launcher
@pytest.mark.usefixtures("threads")
def test_it_runs_without_a_launcher_and_with_every_way_to_train_faster(tmp_path, capsys):
    faster = ["--amp", "bf16", "--channels-last", "--accumulate", "3", "--batch-size", "8"]
    train_resnet.main(["--backend", "gloo", *QUICK, *faster, "--result-dir", str(tmp_path)])
    (result,) = read_results(tmp_path)
    assert set(result) == FIELDS
    assert (result["launcher"], result["backend"], result["world_size"]) == ("python", "gloo", 1)
    (line,) = capsys.readouterr().out.splitlines()
    assert LINE.fullmatch(line)


@pytest.mark.launcher
@pytest.mark.usefixtures("threads")
def test_a_batch_larger_than_the_data_is_trained_on_and_said(capsys):
    train_resnet.main(["--backend", "gloo", *QUICK, "--batch_size=8192"])
    note, line = capsys.readouterr().out.splitlines()
    assert note == "--batch_size 8192: a rank has only 512 images"
    assert LINE.fullmatch(line)


@pytest.mark.launcher
def test_every_launcher_trains_the_same_parameters(tmp_path):
    hashes = {}
    for launcher in ("torchrun", "torch.distributed.launch", "mpirun"):
        results = launch_here(launcher, MODULE, *QUICK, n=2)
        assert [set(result) for result in results] == [FIELDS] * 2
        hashes[launcher] = {result["parameters"] for result in results}
    assert len(set.union(*hashes.values())) == 1, hashes


@pytest.mark.launcher
def test_real_digits_are_learnt_by_two_ranks():
    first, second = launch_here("torchrun", MODULE, n=2, timeout_s=400)
    assert first["accuracy"] == second["accuracy"] >= 0.95
    assert first["loss"] == second["loss"] < 0.2
    assert first["parameters"] == second["parameters"]


# In each rank: three epochs at once, and one, two more after resuming, and none more.
THREE_RUNS = """
from ddp_helpers.scripts import train_resnet
def run(folder, epochs, *options):
    quick = ("--use_syn", "--image_size=16", "--batch_size=64", "--result_dir", folder)
    train_resnet.main([*quick, f"--epochs={epochs}", "--backend=gloo", *options])
run("at once", 3)
run("first", 1, "--save", "saved")
run("resumed", 3, "--save", "saved", "--resume")
run("again", 3, "--save", "saved", "--resume")
"""


@pytest.mark.launcher
def test_a_resumed_run_ends_with_the_parameters_of_an_uninterrupted_one(start_ranks, tmp_path):
    first, second = start_ranks(THREE_RUNS, 2, timeout_s=300)
    assert (first.status, second.status) == (0, 0), first.output + second.output
    hashes = [
        {result["parameters"] for result in read_results(tmp_path / folder)}
        for folder in ("at once", "resumed", "again", "first")
    ]
    assert hashes[0] == hashes[1] == hashes[2] != hashes[3]
    assert len(hashes[0]) == 1
    assert second.output == ""
    lines = [LINE.sub(r"\1/\2", line) for line in first.output.splitlines()]
    assert lines == [
        *("1/3", "2/3", "3/3", "1/1"),
        "continuing saved/checkpoint_e0001_s000000.pt with epoch 2",
        *("2/3", "3/3"),
        "continuing saved/checkpoint_e0003_s000000.pt with epoch 4",
    ]


# In each rank: two epochs at once; and the same, each rank in argv[1] told to stop after 4 steps
# of the first epoch and of the second, and resumed.
STOPPED_TWICE = """
import os, signal, sys, threading, time
from pathlib import Path
from ddp_helpers.scripts import train_resnet
told, options = sys.argv[1].split(","), sys.argv[2:]
def run(folder, *more):
    quick = ("--use_syn", "--image_size=8", "--batch_size=16", "--epochs=2", "--backend=gloo")
    try:
        train_resnet.main([*quick, "--result_dir", folder, *options, *more])
    except SystemExit as leaving:
        print("rank", os.environ["RANK"], "left with", leaving.code, flush=True)
def stop_when_there_is(name):
    def wait():
        while not Path("saved", name).exists():
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGTERM)
    if os.environ["RANK"] in told:
        threading.Thread(target=wait, daemon=True).start()
run("at once")
for epoch in range(2):
    stop_when_there_is(f"checkpoint_e000{epoch}_s000004.pt")
    run("stopped", "--save", "saved", "--save_every=4", "--resume")
run("resumed", "--save", "saved", "--save_every=4", "--resume")
"""


@pytest.mark.launcher
@pytest.mark.parametrize(
    ("told", "options", "last_step"),
    [
        pytest.param("1", (), 16, id="one rank"),
        pytest.param(
            *("0,1", ("--accumulate=2",), 8), id="all ranks, accumulating", marks=pytest.mark.long
        ),
    ],
)
def test_a_signal_saves_once_more_and_a_resumed_run_ends_as_an_uninterrupted_one(
    start_ranks, tmp_path, told, options, last_step
):
    ranks = start_ranks(STOPPED_TWICE, 2, told, *options)
    for number, rank in enumerate(ranks):
        assert rank.status == 0, rank.output
        assert rank.output.count(f"rank {number} left with 143\n") == 2
    at_once, resumed = (read_results(tmp_path / folder) for folder in ("at once", "resumed"))
    for name in ("parameters", "loss", "accuracy"):  # the figures of the whole epoch
        assert [each[name] for each in resumed] == [each[name] for each in at_once]
    saved = re.findall(r"saved saved/checkpoint_e(\d+)_s(\d+).pt", ranks[0].output)
    continued = re.findall(r"continuing \S+ with epoch (\d+), step (\d+)", ranks[0].output)
    assert [epoch for epoch, _ in saved] == ["0000", "0001"]
    assert all(4 < int(step) <= last_step for _, step in saved)
    assert [int(step) for _, step in continued] == [int(step) + 1 for _, step in saved]


# In each rank: a disk that takes a part of a checkpoint; then one epoch of two ranks, and the
# rest of it on one.
FULL_DISK = """
import os, resource
from pathlib import Path
from ddp_helpers.scripts import train_resnet
def run(*options):
    quick = ("--use_syn", "--image_size=8", "--batch_size=64", "--backend=gloo")
    train_resnet.main([*quick, "--save=saved", "--resume", *options])
run("--epochs=1", "--save_every=3")
before = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (10**6, before[1]))
try:
    run("--epochs=2")
except SystemExit as leaving:
    print("status", leaving.code, flush=True)
resource.setrlimit(resource.RLIMIT_FSIZE, before)
Path("saved/checkpoint_e0001_s000000.pt").unlink(missing_ok=True)
if os.environ["RANK"] == "0":
    os.environ.update(WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
    run("--epochs=1")
"""


@pytest.mark.launcher
def test_a_full_disk_is_said_by_every_rank_and_the_run_goes_on_from_the_older_file_on_one_rank(
    start_ranks, tmp_path
):
    ranks = start_ranks(FULL_DISK, 2)
    for rank in ranks:
        assert rank.status == 0, rank.output
        (line,) = [line for line in rank.output.splitlines() if line.startswith("error: ")]
        path = "saved/checkpoint_e0002_s000000.pt"
        assert line == f"error: rank 0: {path} could not be written: [Errno 27] File too large"
        assert "status 1\n" in rank.output
    assert (
        "continuing saved/checkpoint_e0000_s000003.pt with epoch 1, from its start"
        " (ranks 2 then, 1 now)\n"
    ) in ranks[0].output
    assert LINE.search(ranks[0].output.splitlines()[-1])


# Without the seconds that importing torch takes, which are many on a busy machine.
TIMED = f"""
import time
from {MODULE} import main
began = time.monotonic()
try:
    main()
finally:
    print("ended after", time.monotonic() - began, "s", flush=True)
"""
BAD_INPUT = {
    "batch_size 0": (["--batch_size", "0"], 2, "--batch_size 0, expected a number above 0"),
    "no data and no network": (
        ["--data", "cifar10"],
        1,
        "cifar-10-batches-py is not there and could not be fetched",
    ),
    "a truncated checkpoint": (
        ["--save", ".", "--resume"],
        1,
        "checkpoint.pt is damaged or no checkpoint",
    ),
    "a folder of another run": (
        ["--save", "."],
        1,
        "Continue it with --resume, or save elsewhere.",
    ),
}


@pytest.mark.launcher
@pytest.mark.parametrize(("args", "status", "message"), BAD_INPUT.values(), ids=BAD_INPUT)
def test_bad_input_ends_every_rank_with_a_message(
    start_ranks, tmp_path, monkeypatch, args, status, message
):
    for name in ("http_proxy", "https_proxy"):  # nobody listens there
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    torch.save({"model": torch.ones(1000)}, tmp_path / "checkpoint.pt")
    whole = (tmp_path / "checkpoint.pt").read_bytes()
    (tmp_path / "checkpoint.pt").write_bytes(whole[: len(whole) // 2])
    for rank in start_ranks(TIMED, 2, "--backend=gloo", *args):
        assert rank.status == status, rank.output
        assert message in rank.output
        assert "Traceback" not in rank.output
        assert float(re.search(r"ended after (.+) s", rank.output)[1]) < 10
