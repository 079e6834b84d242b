"""What a job started here inherits: this process's variables without its own place in a job.

A notebook opened inside a cluster job then behaves like one opened on a laptop.
Lesson: notebooks/05_three_launchers.ipynb
"""

from __future__ import annotations

import re
from collections.abc import Mapping

MARK = "DDP_HELPERS_JOB"  # holds the ids of the jobs a process belongs to

# OMPI_MCA_*, PRTE_MCA_* and OMPI_ALLOW_* are the user's settings, but for some that mpirun itself
# sets in its ranks. PET_* are torchrun's options, which a cluster's operator sets for its own job.
_IDENTITY = re.compile(
    r"RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|NODE_RANK|MASTER_ADDR|MASTER_PORT"
    r"|GROUP_(RANK|WORLD_SIZE)|ROLE_(RANK|WORLD_SIZE|NAME)|TORCHELASTIC_.*|PET_.*"
    r"|OMPI_(?!MCA_|ALLOW_).*|OMPI_MCA_(ess|ess_base_.*|pmix|initial_wdir|num_procs)"
    r"|OMPI_MCA_orte_(app_num|bound_at_launch|ess_.*|hnp_uri|jobfam_session_dir|launch)"
    r"|OMPI_MCA_orte_(local_daemon_uri|num_nodes|precondition_transports|tmpdir_base)"
    r"|OMPI_MCA_orte_top_session_dir"
    r"|PRTE_(?!MCA_|ALLOW_).*|PMIX_(?!MCA_|INSTALL_|LIB|PKG).*|PMI_.*|MPI_LOCAL.*"
    r"|HYDI_.*|HYDRA_BSTRAP_.*"
)
_SLURM_STEP = re.compile(r"SLURM_(STEP.*|PROCID|LOCALID|NODEID|GTIDS|TASK_PID)")
_SLURM = re.compile(r"SLURM_.*")


def child_environ(environ: Mapping[str, str], job_id: str, in_slurm: bool) -> dict[str, str]:
    """Return environ for a job's launcher: without a surrounding job's identity, marked job_id.

    in_slurm keeps the allocation, which srun needs; mpirun would start ranks on all its nodes.
    """
    slurm = _SLURM_STEP if in_slurm else _SLURM
    kept = {
        name: value
        for name, value in environ.items()
        if not _IDENTITY.fullmatch(name) and not slurm.fullmatch(name)
    }
    kept.setdefault("OMP_NUM_THREADS", "1")  # torchrun's own default, without its banner
    # One job may start another: the outer one must still find all its processes.
    kept[MARK] = ":".join(filter(None, [environ.get(MARK), job_id]))
    return kept
