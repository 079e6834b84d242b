import re
import subprocess
import sys

import pytest

from ddp_helpers.launch.mpi import find_mpirun
from ddp_helpers.worker.console import (
    print_in_rank_order,
    progress,
    rank_logger,
    say,
    short_errors,
)

launcher = pytest.mark.launcher


def test_every_line_bears_its_rank(capsys):
    say(3, "one\ntwo")
    assert capsys.readouterr().out == "[rank 3] one\n[rank 3] two\n"


def test_only_rank_0_logs_and_every_rank_warns(capsys):
    for rank in (0, 1):
        logger = rank_logger(rank, name="test")
        logger.info("epoch 1")
        logger.warning("careful")
    assert capsys.readouterr().out == "epoch 1\ncareful\n[rank 1] careful\n"


def test_asking_for_the_logger_again_does_not_double_its_lines(capsys):
    rank_logger(0, name="test").info("first")
    rank_logger(0, name="test").info("second")
    assert capsys.readouterr().out == "first\nsecond\n"


def test_there_is_no_progress_bar_without_a_terminal(capsys):
    assert list(progress(range(3), rank=0)) == [0, 1, 2]
    assert list(progress(range(3), rank=1)) == [0, 1, 2]
    assert capsys.readouterr().err == ""


def test_a_group_of_one_prints_in_order_without_a_process_group(capsys):
    print_in_rank_order(0, 1, "alone")
    assert capsys.readouterr().out == "[rank 0] alone\n"


def test_a_user_error_ends_with_its_text_and_status_1(capsys):
    with pytest.raises(SystemExit) as caught, short_errors(ValueError):
        raise ValueError("RANK=9\nexport RANK=0")
    assert caught.value.code == 1
    assert capsys.readouterr().err == "error: RANK=9\nexport RANK=0\n"


def test_another_error_keeps_its_traceback():
    with pytest.raises(KeyError), short_errors(ValueError):
        raise KeyError("bug")


def test_eight_hundred_lines_of_four_processes_arrive_whole(tmp_path):
    code = (
        "import sys\nfrom ddp_helpers.worker.console import say\n"
        "for number in range(200): say(int(sys.argv[1]), f'line {number} ' + 'x' * 300)\n"
    )
    log = tmp_path / "log"
    with log.open("w") as stream:
        ranks = [
            subprocess.Popen([sys.executable, "-c", code, str(rank)], stdout=stream)
            for rank in range(4)
        ]
        assert [rank.wait(60) for rank in ranks] == [0] * 4
    lines = log.read_text().splitlines()
    assert len(lines) == 800
    whole = [re.fullmatch(r"\[rank (\d)\] line (\d+) x{300}", line) for line in lines]
    assert all(whole)
    assert {(match[1], match[2]) for match in whole} == {
        (str(rank), str(number)) for rank in range(4) for number in range(200)
    }


@launcher
def test_B28_lines_are_whole_under_mpiruns_own_labels(tmp_path):
    """https://github.com/open-mpi/ompi/issues/6948: a label in the middle of a line."""
    script = tmp_path / "lines.py"
    script.write_text(
        "from ddp_helpers.worker.console import say\n"
        "from ddp_helpers.worker.environment import detect\n"
        "rank = detect().rank\n"
        "for number in range(200): say(rank, f'line {number}')\n"
    )
    command = [find_mpirun().path, "-n", "4", "--oversubscribe", "--tag-output"]
    command += [sys.executable, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    labelled = r"\[\d+,(\d)\]<stdout>: ?\[rank (\d)\] line (\d+)"
    lines = [re.fullmatch(labelled, line) for line in done.stdout.splitlines()]
    assert all(lines)
    assert all(line[1] == line[2] for line in lines)
    for rank in "0123":
        assert [int(line[3]) for line in lines if line[2] == rank] == list(range(200))


@launcher
def test_rank_0_prints_all_texts_in_rank_order(start_ranks):
    code = """
from ddp_helpers.worker.console import print_in_rank_order
from ddp_helpers.worker.environment import detect
from ddp_helpers.worker.process_group import process_group
env = detect()
with process_group(env, timeout_s=60):
    print_in_rank_order(env.rank, env.world_size, f"mine is {env.rank}")
"""
    first, second, third = start_ranks(code, 3)
    assert first.output == "".join(f"[rank {rank}] mine is {rank}\n" for rank in range(3))
    assert second.output == third.output == ""
