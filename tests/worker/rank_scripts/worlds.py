"""What tests/worker/conftest.py starts four times: worlds.py RANK RANKS FOLDER.

Every function in WORLDS of an in_*.py is called as function(rank, world_size, folder) in a process
group of each size given there. What it returns, as JSON, goes to FOLDER/RANK.json. After DEADLINE_S
each rank writes where it stands and ends.
"""

import faulthandler
import importlib
import json
import sys
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

TIMEOUT = timedelta(seconds=30)
DEADLINE_S = 200


def main(rank: int, ranks: int, folder: Path) -> None:
    scripts = sorted(Path(__file__).parent.glob("in_*.py"))
    worlds = {}
    for script in scripts:
        worlds |= importlib.import_module(script.stem).WORLDS
    values = {}
    store = dist.FileStore(str(folder / "store"), ranks)
    for world_size in range(1, ranks + 1):
        functions = [function for function, sizes in worlds.items() if world_size in sizes]
        if rank >= world_size:
            continue
        for function in functions:
            name = f"{function.__name__}[{world_size}]"
            # A group of its own for each: one that failed cannot disturb the next.
            dist.init_process_group(
                "gloo",
                store=dist.PrefixStore(name, store),
                rank=rank,
                world_size=world_size,
                timeout=TIMEOUT,
            )
            # A rank that left a group before another had its connections would leave that one
            # waiting past the timeout: gloo is silent while it connects.
            dist.barrier()
            try:
                values[name] = function(rank, world_size, folder)
            except Exception as error:
                values[name] = {"error": f"{type(error).__name__}: {error}"}
            dist.destroy_process_group()
    (folder / f"{rank}.json").write_text(json.dumps(values))


if __name__ == "__main__":
    faulthandler.dump_traceback_later(DEADLINE_S, exit=True)
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
