"""Worlds of 1 to 4 ranks, started once for all tests of this folder.

A torch process takes seconds to start, so four are started together and open one process group
after another: of 1, 2, 3 and 4 ranks. In each they run what rank_scripts/in_*.py ask for; a test
then looks at the value that each rank returned.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

RANK_SCRIPTS = Path(__file__).parent / "rank_scripts"
RANKS = 4


@pytest.fixture(scope="session")
def worlds(tmp_path_factory) -> Callable[[str, int], list]:
    """Return a function: (name of a check, world size) -> what each rank returned, rank 0 first.

    A rank that raised returned {"error": type and text}.
    """
    folder = tmp_path_factory.mktemp("worlds")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    processes = []
    with (folder / "output").open("w") as output:
        for rank in range(RANKS):
            processes.append(
                subprocess.Popen(
                    [sys.executable, RANK_SCRIPTS / "worlds.py", str(rank), str(RANKS), folder],
                    env=environment,
                    cwd=folder,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            )
        try:
            for process in processes:
                process.wait(timeout=240)  # past worlds.DEADLINE_S
        finally:
            for process in processes:
                process.kill()
                process.wait()
    text = (folder / "output").read_text()
    assert [process.returncode for process in processes] == [0] * RANKS, text
    returned = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]

    def values(name: str, world_size: int) -> list:
        return [of_rank[f"{name}[{world_size}]"] for of_rank in returned[:world_size]]

    return values


@pytest.fixture
def group_of_one():
    """A process group of this process alone."""
    import torch.distributed as dist

    dist.init_process_group(
        "gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=20)
    )
    yield
    dist.destroy_process_group()
