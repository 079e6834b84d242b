"""One rank of a notebook: an engine of ipyparallel, started by mpirun in a keeper's folder.

    mpirun -n 4 python -m ddp_helpers.lesson.engine FOLDER_OF_RANK_0 FOLDER_OF_RANK_1 ...

Lesson: notebooks/01_processes_and_ranks.ipynb
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

FILE = "engine.json"  # of the folder: where the controller is, and the key to it
START_S = 120.0  # a busy machine may need most of it; a quiet one 4 seconds


def main(folders: list[str]) -> None:
    """Be the engine of this rank until the controller or mpirun ends."""
    from mpi4py import MPI

    rank = MPI.COMM_WORLD.Get_rank()
    folder = Path(folders[rank])
    if not folder.exists():
        host = socket.gethostname()
        sys.exit(f"rank {rank} runs on {host}, expected it on the host that has {folder}.")
    # The user's own profile takes no part, and nothing is left outside the folder.
    os.environ["IPYTHONDIR"] = str(folder / "ipython")
    from ipyparallel.engine.app import main as engine

    profile = folder / "profile"
    profile.mkdir(exist_ok=True)  # the ranks of a host share it
    settings = [f"--profile-dir={profile}", f"--file={folder / FILE}"]
    settings += [f"--IPEngine.wait_for_url_file={START_S}", f"--IPEngine.timeout={START_S}"]
    settings += ["--IPEngine.enable_nanny=False", "--log-level=ERROR", "--mpi"]
    engine(settings)


if __name__ == "__main__":
    main(sys.argv[1:])
