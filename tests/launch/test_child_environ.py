import pytest

from ddp_helpers.launch.child_environ import child_environ

KEPT = {
    "PATH": "/bin",
    "HOME": "/root",
    "LOCAL_DATA": "/data",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_MCA_btl": "^openib",
    "OMPI_MCA_orte_base_help_aggregate": "0",
    "PRTE_MCA_plm_ssh_args": "-p 2222",
    "PMIX_MCA_gds": "hash",
    "GLOO_SOCKET_IFNAME": "eth0",
    "NCCL_DEBUG": "INFO",
    "HYDRA_IFACE": "eth0",
    "I_MPI_PIN": "0",
    "CUDA_VISIBLE_DEVICES": "0,1",
}


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(
            "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE ROLE_RANK"
            " ROLE_WORLD_SIZE ROLE_NAME MASTER_ADDR MASTER_PORT TORCHELASTIC_RUN_ID"
            " TORCHELASTIC_USE_AGENT_STORE PET_NNODES PET_TEE",
            id="torchrun",
        ),
        pytest.param(
            "OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE OMPI_UNIVERSE_SIZE OMPI_VERSION PMIX_RANK"
            " PMIX_NAMESPACE PMIX_SERVER_URI41 PRTE_LAUNCHED OMPI_MCA_num_procs",
            id="Open MPI 5",
        ),
        pytest.param(
            "OMPI_MCA_ess OMPI_MCA_ess_base_jobid OMPI_MCA_orte_hnp_uri OMPI_MCA_orte_launch"
            " OMPI_MCA_orte_local_daemon_uri OMPI_MCA_orte_ess_node_rank OMPI_MCA_pmix PMIX_ID",
            id="Open MPI 4",
        ),
        pytest.param(
            "PMI_RANK PMI_SIZE PMI_FD MPI_LOCALRANKID MPI_LOCALNRANKS HYDI_CONTROL_FD"
            " HYDRA_BSTRAP_UPSTREAM_FD",
            id="hydra",
        ),
        pytest.param("SLURM_PROCID SLURM_JOB_ID SLURM_NTASKS SLURM_STEP_ID", id="Slurm"),
    ],
)
def test_the_identity_of_a_surrounding_job_is_hidden_and_settings_stay(names):
    around = dict.fromkeys(names.split(), "7")
    child = child_environ({**KEPT, **around}, "abc", in_slurm=False)
    assert child == {**KEPT, "OMP_NUM_THREADS": "1", "DDP_HELPERS_JOB": "abc"}


def test_srun_keeps_its_allocation_but_not_the_step():
    around = {"SLURM_JOB_ID": "5", "SLURM_NTASKS": "4", "SLURM_STEP_ID": "0", "SLURM_PROCID": "3"}
    child = child_environ(around, "abc", in_slurm=True)
    assert {name for name in child if name.startswith("SLURM")} == {"SLURM_JOB_ID", "SLURM_NTASKS"}


def test_the_users_number_of_threads_stays():
    assert child_environ({"OMP_NUM_THREADS": "4"}, "abc", False)["OMP_NUM_THREADS"] == "4"


def test_a_job_inside_a_job_carries_both_marks():
    assert child_environ({"DDP_HELPERS_JOB": "outer"}, "inner", False)["DDP_HELPERS_JOB"] == (
        "outer:inner"
    )
