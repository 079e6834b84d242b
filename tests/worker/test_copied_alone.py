"""Each worker/ file works when it is copied, with the siblings it names, next to a script.

The package itself cannot be imported there, so a use of it that was overlooked fails.
"""

import json
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

# For files that need rank and world size, or a process group, from elsewhere.
OWN_SETUP = """
import os
from datetime import timedelta
import torch.distributed as dist
rank = int(os.environ.get("RANK") or os.environ["OMPI_COMM_WORLD_RANK"])
world_size = 2
def meet():
    store = dist.FileStore(os.path.abspath("store"), world_size)
    return dict(store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
"""

# file -> what an engineer would do with it in each rank; `check` ends every script.
USES = {
    "environment": """
from environment import detect
env = detect()
rank, world_size = env.rank, env.world_size
""",
    "network": """
import network
assert network.is_mine(network.resolve("localhost"))
""",
    "console": """
import console
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
    "watchdog": """
import torch.distributed as dist
from watchdog import watchdog
dist.init_process_group("gloo", **meet())
with watchdog(rank, world_size):
    dist.barrier()
dist.destroy_process_group()
""",
    "checks": """
import torch, torch.distributed as dist
from checks import check_equal_lengths, check_equal_replicas, parameters_hash
dist.init_process_group("gloo", **meet())
torch.manual_seed(0)
model = torch.nn.Linear(2, 2)
check_equal_lengths([0, 1])
check_equal_replicas(model)
assert len(parameters_hash(model)) == 64
dist.destroy_process_group()
""",
    "metrics": """
import torch.distributed as dist
from metrics import mean_over_ranks
dist.init_process_group("gloo", **meet())
assert mean_over_ranks(total=dist.get_rank(), count=1) == 0.5
dist.destroy_process_group()
""",
    "fetch": """
import time
from pathlib import Path
from fetch import fetch_once
def fetch(folder):
    (folder / "data").mkdir()
    time.sleep(0.5)
    (folder / "data" / "file").write_text("whole")
fetch_once(Path("data").absolute(), fetch, rank, timeout_s=60, hint="none")
assert Path("data/file").read_text() == "whole"
""",
    "data": """
from data import evaluation_loader, load, train_loader
train_set, test_set = load("digits", image_size=8)
assert len(train_loader(train_set, 32, rank, world_size)) == 23
assert len(evaluation_loader(test_set, 1, rank, world_size)) == 180
""",
    "replica": """
import torch, torch.distributed as dist
from replica import set_seed, set_threads, wrap
set_threads(local_world_size=2)
set_seed(0, rank)
dist.init_process_group("gloo", **meet())
wrap(torch.nn.Linear(2, 2), torch.device("cpu"))(torch.ones(1, 2)).sum().backward()
dist.destroy_process_group()
""",
    "training": """
import torch, torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset
from training import evaluate, train_one_epoch
dist.init_process_group("gloo", **meet())
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
loader = DataLoader(TensorDataset(torch.randn(8, 4), torch.randint(2, (8,))), 4)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
assert train_one_epoch(model, loader, optimizer, torch.device("cpu"), 0).images_per_s > 0
assert 0 <= evaluate(model, loader, torch.device("cpu")) <= 1
dist.destroy_process_group()
""",
    "checkpoint": """
import torch, torch.distributed as dist
from checkpoint import load, save
dist.init_process_group("gloo", **meet())
model = torch.nn.Linear(2, 2)
save("checkpoint.pt", model, epoch=3)
assert load("checkpoint.pt", model).epoch == 3
dist.destroy_process_group()
""",
    "rotation": """
import torch, torch.distributed as dist
from rotation import found, load_newest, save_next
dist.init_process_group("gloo", **meet())
model = torch.nn.Linear(2, 2)
for step in range(3):
    save_next("run", 2, model, epoch=1, step=step)
assert load_newest("run", model).step == 2  # after it, rank 0 has removed the oldest
assert len(found("run")) == 2
dist.destroy_process_group()
""",
    "stop": """
import os, signal
import torch, torch.distributed as dist
from stop import stop_notice
dist.init_process_group("gloo", **meet())
with stop_notice(torch.device("cpu")) as stop_now:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    step = 1
    while not stop_now():
        dist.all_reduce(torch.ones(1))
        step += 1
    assert step == 3
dist.destroy_process_group()
""",
}

# Runs in each rank: one child per copied file, in the file's own folder. A fork after torch was
# imported, and not a launch per file, because importing torch takes seconds.
IN_EACH_RANK = """
import json, os, runpy, sys, traceback
import torch, torch.distributed, torch.utils.data
rank = os.environ.get("RANK") or os.environ["OMPI_COMM_WORLD_RANK"]
ended = {}
for name in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        os.chdir(name)
        sys.path.insert(0, os.getcwd())
        os.environ["TORCHELASTIC_RESTART_COUNT"] = name  # each child a job of its own
        try:
            runpy.run_path("train.py", run_name="__main__")
        except BaseException:
            open(f"error_{rank}", "w").write(traceback.format_exc())
        os._exit(os.path.exists(f"error_{rank}"))
    ended[name] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
open(f"ended_{rank}.json", "w").write(json.dumps(ended))
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


@pytest.fixture(scope="module", params=LAUNCHERS)
def folder(request, tmp_path_factory):
    """Copy each file with its siblings into a folder of its own and use all under one launcher."""
    folder = tmp_path_factory.mktemp(request.param)
    for name, use in USES.items():
        (folder / name).mkdir()
        for file in {name, *siblings(name)}:
            shutil.copy(WORKER / f"{file}.py", folder / name)
        (folder / name / "train.py").write_text(REFUSE_THE_PACKAGE + OWN_SETUP + use)
    (folder / "in_each_rank.py").write_text(IN_EACH_RANK)
    done = subprocess.run(
        [*LAUNCHERS[request.param](), "in_each_rank.py", *USES],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return folder


@pytest.mark.parametrize("name", USES)
def test_a_copied_file_works_without_the_package(name, folder):
    for rank in range(2):
        error = folder / name / f"error_{rank}"
        assert not error.exists(), error.read_text()
        assert json.loads((folder / f"ended_{rank}.json").read_text())[name] == 0
