"""Each worker/ file works when it is copied, with the siblings it names, next to a script.

The package itself cannot be imported there, so a use of it that was overlooked fails.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import ddp_helpers.worker
from ddp_helpers.launch.mpi import find_mpirun

pytestmark = pytest.mark.launcher

WORKER = Path(ddp_helpers.worker.__file__).parent

REFUSE_THE_PACKAGE = """
import sys
sys.modules["ddp_helpers"] = None  # any import of the package fails
"""

# file -> what an engineer would do with it in each rank; `check` ends every script.
USES = {
    "environment": """
from environment import detect
env = detect()
rank, world_size = env.rank, env.world_size
""",
    "network": """
import network, os
assert network.is_mine(network.resolve("localhost"))
rank = int(os.environ.get("RANK") or os.environ["OMPI_COMM_WORLD_RANK"])
world_size = 2
""",
    "console": """
import console, os
rank = int(os.environ.get("RANK") or os.environ["OMPI_COMM_WORLD_RANK"])
world_size = 2
console.rank_logger(rank).info("logged by rank 0 only")
""",
    "rendezvous": """
from environment import detect
import rendezvous
env = detect()
rendezvous.check_master(env)
store = rendezvous.meet(env, 60)
store.set(f"hello from {env.rank}", "yes")
store.wait([f"hello from {other}" for other in range(env.world_size)])
store.add("done", 1)
while env.rank == 0 and store.add("done", 0) < env.world_size:
    pass
rank, world_size = env.rank, env.world_size
""",
    "process_group": """
from environment import detect
from process_group import process_group
import torch, torch.distributed as dist
env = detect()
with process_group(env, timeout_s=60) as device:
    total = torch.ones(1, device=device)
    dist.all_reduce(total)
    assert total.item() == env.world_size
rank, world_size = env.rank, env.world_size
""",
}
CHECK = """
print(f"rank {rank} of {world_size} done\\n", end="", flush=True)
"""
LAUNCHERS = {
    "torchrun": lambda: [
        sys.executable,
        *("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"),
    ],
    "mpirun": lambda: [
        find_mpirun().path,
        *("-np", "2", "--map-by", "slot:oversubscribe", "--bind-to", "none", sys.executable),
    ],
}


def siblings(name: str) -> set[str]:
    """Return the files that the first lines of name.py say to take along, and what they need."""
    head = "\n".join((WORKER / f"{name}.py").read_text().splitlines()[:6])
    named = set(re.findall(r"\b(\w+)\.py\b", head)) - {name}
    return named.union(*(siblings(other) for other in named))


def test_every_worker_file_has_a_use_here():
    files = {path.stem for path in WORKER.glob("*.py")} - {"__init__"}
    assert set(USES) == files


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("name", USES)
def test_a_copied_file_works_without_the_package(name, launcher, tmp_path):
    for file in {name, *siblings(name)}:
        shutil.copy(WORKER / f"{file}.py", tmp_path)
    script = tmp_path / "train.py"
    script.write_text(REFUSE_THE_PACKAGE + USES[name] + CHECK)
    done = subprocess.run(
        [*LAUNCHERS[launcher](), str(script)],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    for rank in range(2):
        assert f"rank {rank} of 2 done" in done.stdout
