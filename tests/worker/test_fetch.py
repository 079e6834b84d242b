import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ddp_helpers.worker.fetch import DataNotAvailable, fetch_once

# One rank: fetch slowly, in two halves, and say when it began; or fail.
RANK = """
import json, os, sys, time
from pathlib import Path
from ddp_helpers.worker.fetch import DataNotAvailable, fetch_once

folder, local_rank, how = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]

def fetch(partial):
    with open(folder / "calls", "a") as calls:
        calls.write(f"{os.getpid()}\\n")
    (partial / "data").mkdir()
    (partial / "data" / "first").write_text("half")
    time.sleep(0.5)
    if how == "fails":
        raise OSError("no network")
    if how == "dies":
        os.kill(os.getpid(), 9)
    (partial / "data" / "second").write_text("half")

time.sleep(float(sys.argv[4]))
began = time.monotonic()
try:
    fetch_once(folder / "data", fetch, local_rank, timeout_s=20, hint="Copy it by hand.")
    seen = sorted(path.name for path in (folder / "data").iterdir())
except DataNotAvailable as error:
    seen = str(error)
print(json.dumps({"seen": seen, "seconds": time.monotonic() - began}))
"""


def run_ranks(folder, local_ranks, how="works", delays=None):
    """Start one process per local rank; return what each has seen."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, folder, str(local_rank), how, str(delay)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for local_rank, delay in zip(local_ranks, delays or [0] * len(local_ranks), strict=True)
    ]
    texts = [process.communicate(timeout=60)[0] for process in processes]
    return [json.loads(text) if text else None for text in texts]


def calls(folder):
    return (folder / "calls").read_text().splitlines()


@pytest.mark.parametrize(
    ("local_ranks", "delays"),
    [
        pytest.param([0, 1, 2, 3], None, id="one node"),
        pytest.param([0, 1, 0, 1], None, id="two nodes, one disk"),
        pytest.param([1, 0], [0, 0.5], id="the fetching rank comes last"),
    ],
)
def test_B43_one_rank_fetches_and_every_rank_sees_the_whole(local_ranks, delays, tmp_path):
    """https://github.com/pytorch/tutorials/issues/3065: all ranks download at once."""
    values = run_ranks(tmp_path, local_ranks, delays=delays)
    assert [value["seen"] for value in values] == [["first", "second"]] * len(local_ranks)
    assert len(calls(tmp_path)) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["calls", "data"]


def test_B43_a_failure_reaches_every_rank_within_seconds(tmp_path):
    """https://github.com/pytorch/tutorials/issues/3065: all ranks download at once."""
    values = run_ranks(tmp_path, [0, 1, 2, 3], "fails")
    assert len(calls(tmp_path)) == 1
    assert len({value["seen"] for value in values}) == 1
    for value in values:
        assert f"{tmp_path / 'data'} is not there" in value["seen"]
        assert "OSError: no network\nCopy it by hand." in value["seen"]
        assert value["seconds"] < 6


def test_the_next_try_after_a_failure_works(tmp_path):
    run_ranks(tmp_path, [0, 1], "fails")
    values = run_ranks(tmp_path, [1, 0], "works", delays=[0, 0.5])
    assert [value["seen"] for value in values] == [["first", "second"]] * 2


def test_ranks_notice_at_once_that_the_fetching_one_was_killed(tmp_path):
    first, second = run_ranks(tmp_path, [0, 1], "dies")
    assert first is None
    assert f"rm {tmp_path / '.data.lock'}" in second["seen"]
    assert second["seconds"] < 6
    (third,) = run_ranks(tmp_path, [0])  # the lock is still there
    assert third["seen"] == second["seen"]
    (tmp_path / ".data.lock").unlink()
    assert run_ranks(tmp_path, [0])[0]["seen"] == ["first", "second"]


def never(folder: Path):
    raise AssertionError("fetched")


def test_a_folder_that_is_there_is_left_alone(tmp_path):
    (tmp_path / "data").mkdir()
    fetch_once(tmp_path / "data", never, local_rank=0)


def test_a_wait_for_another_host_ends_and_names_its_lock(tmp_path):
    lock = tmp_path / ".data.lock"
    lock.write_text(f"not-{socket.gethostname()} {os.getpid()}")
    with pytest.raises(DataNotAvailable, match="did not come within 0.3 s") as caught:
        fetch_once(tmp_path / "data", never, local_rank=0, timeout_s=0.3)
    assert str(lock) in str(caught.value)


def test_a_wait_for_a_local_rank_0_that_is_not_there_ends(tmp_path):
    with pytest.raises(DataNotAvailable, match="Local rank 0 of this node should fetch it"):
        fetch_once(tmp_path / "data", never, local_rank=1, timeout_s=0.3)


def test_an_old_word_of_failure_is_not_believed(tmp_path):
    word = tmp_path / ".data.failed"
    word.write_text("last week")
    os.utime(word, (time.time() - 100, time.time() - 100))
    with pytest.raises(DataNotAvailable, match="did not come"):
        fetch_once(tmp_path / "data", never, local_rank=1, timeout_s=1.5)


def test_ctrl_c_stays_ctrl_c_and_is_told_to_the_others(tmp_path):
    def interrupted(folder):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch_once(tmp_path / "data", interrupted, local_rank=0)
    with pytest.raises(DataNotAvailable, match="KeyboardInterrupt"):
        fetch_once(tmp_path / "data", never, local_rank=1)


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataNotAvailable, match=r"Cannot make the folder .*file/data"):
        fetch_once(tmp_path / "file" / "data" / "final", never, local_rank=1)
