"""A kernel is killed anywhere in a lesson: nothing is left, and the lesson runs again."""

import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from ddp_helpers.lesson import processes

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
LESSONS = ("01_processes_and_ranks", "02_message_passing", "03_data_parallel_by_hand")
TRIALS = 10
LONGEST_S = 14  # of the 15 s and more that each of these lessons takes

pytestmark = [pytest.mark.launcher, pytest.mark.long]


def kernel_of(process: subprocess.Popen) -> psutil.Process | None:
    for child in psutil.Process(process.pid).children():
        if "ipykernel_launcher" in " ".join(child.cmdline()):
            return child
    return None


@pytest.mark.timeout(1800)
def test_after_each_of_ten_kills_nothing_is_left_and_the_lesson_passes(tmp_path, wait_until):
    for number in range(TRIALS):
        chance = random.Random(f"kill {number}")
        lesson = NOTEBOOKS / f"{chance.choice(LESSONS)}.ipynb"
        after_s = chance.uniform(0, LONGEST_S)
        copy = shutil.copy(lesson, tmp_path)  # execute.py would write to it
        with subprocess.Popen(
            [sys.executable, NOTEBOOKS / "execute.py", copy], stderr=subprocess.DEVNULL
        ) as process:
            kernel = wait_until(lambda process=process: kernel_of(process))
            time.sleep(after_s)
            kernel.send_signal(signal.SIGKILL)
            assert process.wait(timeout=60) != 0
        wait_until(lambda kernel=kernel: not processes.of_kernel(kernel.pid))
        again = [sys.executable, "-m", "pytest", "-q", "--nbval", lesson]
        done = subprocess.run(again, capture_output=True, text=True, check=False, timeout=300)
        print(f"{lesson.stem} killed after {after_s:4.1f} s; then {done.stdout.splitlines()[-1]}")
        assert done.returncode == 0, done.stdout
