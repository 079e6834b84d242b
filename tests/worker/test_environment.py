import argparse

import pytest

from ddp_helpers.worker.environment import (
    LaunchEnvironment,
    LaunchEnvironmentError,
    add_local_rank_argument,
    detect,
    explain,
)

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "node-a",
    "MASTER_PORT": "29500",
}
AS_TORCHRUN = LaunchEnvironment("torchrun", 3, 4, 1, 2, 1, "node-a", 29500)
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "0",
}
AS_OPEN_MPI = LaunchEnvironment("Open MPI", 1, 4, 0, 2, None, None, None)
HYDRA = {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
AS_HYDRA = LaunchEnvironment("hydra", 2, 4, 0, 2, None, None, None)
SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_NTASKS": "3",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
}
AS_SLURM = LaunchEnvironment("Slurm", 2, 3, 0, 1, 1, None, None)
BY_HAND = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
AS_BY_HAND = LaunchEnvironment("environment", 1, 2, 1, 2, None, None, None)
MASTER = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
STALE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
# A batch script or a shell in an allocation: no step, so python is one process.
SLURM_SHELL = {
    "SLURM_JOB_ID": "1",
    "SLURM_PROCID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_LOCALID": "0",
}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        pytest.param({}, LaunchEnvironment("python"), id="no launcher"),
        pytest.param(TORCHRUN, AS_TORCHRUN, id="torchrun"),
        pytest.param(OPEN_MPI, AS_OPEN_MPI, id="Open MPI"),
        pytest.param(HYDRA, AS_HYDRA, id="hydra"),
        pytest.param(SLURM, AS_SLURM, id="Slurm"),
        pytest.param(BY_HAND, AS_BY_HAND, id="exported by hand"),
        pytest.param(
            {**OPEN_MPI, **MASTER},
            LaunchEnvironment("Open MPI", 1, 4, 0, 2, None, "10.0.0.1", 29500),
            id="Open MPI with a master",
        ),
        pytest.param({**OPEN_MPI, **STALE}, AS_OPEN_MPI, id="mpirun with a stale RANK"),
        pytest.param({**OPEN_MPI, **TORCHRUN}, AS_TORCHRUN, id="torchrun inside mpirun"),
        pytest.param({**SLURM, **TORCHRUN}, AS_TORCHRUN, id="torchrun inside srun"),
        pytest.param({**SLURM, **OPEN_MPI}, AS_OPEN_MPI, id="mpirun inside Slurm"),
        pytest.param({**SLURM, **HYDRA}, AS_HYDRA, id="mpiexec inside Slurm"),
        pytest.param(
            {**SLURM, "PMI_RANK": "2", "PMI_SIZE": "3"}, AS_SLURM, id="srun that also sets PMI"
        ),
        pytest.param(SLURM_SHELL, LaunchEnvironment("python"), id="shell in an allocation"),
        pytest.param(
            {**SLURM, "SLURM_STEP_TASKS_PER_NODE": "2(x2),1", "SLURM_NODEID": "1"},
            LaunchEnvironment("Slurm", 2, 3, 0, 2, 1, None, None),
            id="Slurm's repeated counts",
        ),
    ],
)
def test_detect_reads_the_launcher_that_started_this_process(environ, expected):
    assert detect(environ) == expected


@pytest.mark.parametrize(
    "environ", [TORCHRUN, OPEN_MPI, HYDRA, SLURM, BY_HAND], ids=lambda e: next(iter(e))
)
def test_B01_a_missing_variable_is_named_not_guessed(environ):
    """The local rank is left out.

    https://github.com/LambdaLabsML/distributed-training-guide/issues/59
    """
    needed = set(environ) - {
        *("OMPI_COMM_WORLD_NODE_RANK", "SLURM_JOB_ID", "SLURM_NTASKS", "SLURM_STEP_ID"),
        *("TORCHELASTIC_RUN_ID",),
    }
    for name in needed:
        with pytest.raises(LaunchEnvironmentError, match=rf"\b{name}\b"):
            detect({key: value for key, value in environ.items() if key != name})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"OMPI_COMM_WORLD_RANK": "4"}, "OMPI_COMM_WORLD_RANK=4, expected 0 <= OMPI_COMM_WORLD_RA"),
        ({"OMPI_COMM_WORLD_RANK": "-1"}, "OMPI_COMM_WORLD_RANK='-1', expected a whole number"),
        ({"OMPI_COMM_WORLD_RANK": "one"}, "OMPI_COMM_WORLD_RANK='one'"),
        ({"OMPI_COMM_WORLD_RANK": ""}, "OMPI_COMM_WORLD_RANK not set"),
        ({"OMPI_COMM_WORLD_SIZE": "0"}, "OMPI_COMM_WORLD_SIZE=0, expected 1 or more"),
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "2"}, "OMPI_COMM_WORLD_LOCAL_RANK=2"),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "8"}, "OMPI_COMM_WORLD_LOCAL_SIZE=8 ranks on this node"),
        ({"MASTER_ADDR": "a", "MASTER_PORT": "99999"}, "MASTER_PORT=99999, expected a port"),
        ({"MASTER_ADDR": "a", "MASTER_PORT": "0"}, "MASTER_PORT=0, expected a port"),
        ({"MASTER_ADDR": "a", "MASTER_PORT": "http"}, "MASTER_PORT='http'"),
        ({"MASTER_ADDR": "a"}, "MASTER_PORT not set, but MASTER_ADDR is"),
        ({"MASTER_PORT": "29500"}, "MASTER_ADDR not set, but MASTER_PORT is"),
    ],
)
def test_a_value_that_cannot_be_is_refused(change, message):
    with pytest.raises(LaunchEnvironmentError) as caught:
        detect({**OPEN_MPI, **change})
    assert str(caught.value).startswith(message)
    assert len(str(caught.value).splitlines()) <= 3


def test_a_rank_out_of_range_is_named_before_what_is_missing():
    with pytest.raises(LaunchEnvironmentError, match=r"^RANK=2, expected 0 <= RANK < 2 \(WORLD"):
        detect({"RANK": "2", "WORLD_SIZE": "2"})


def test_a_node_that_slurm_does_not_list_is_refused():
    with pytest.raises(LaunchEnvironmentError, match="SLURM_NODEID=2, but .* lists 2 nodes"):
        detect({**SLURM, "SLURM_NODEID": "2"})


def test_B01_the_local_rank_is_the_launchers_own_and_never_computed():
    """https://github.com/LambdaLabsML/distributed-training-guide/issues/59"""
    by_node = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}  # placed --map-by node
    by_node |= {"OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    by_node |= {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
    assert detect(by_node) == LaunchEnvironment("Open MPI", 1, 4, 0, 2, None, "10.0.0.1", 29500)
    del by_node["OMPI_COMM_WORLD_LOCAL_RANK"]
    with pytest.raises(LaunchEnvironmentError, match="OMPI_COMM_WORLD_LOCAL_RANK not set"):
        detect(by_node)


def test_explain_says_which_launcher_why_and_what_was_ignored():
    text = explain({**OPEN_MPI, **STALE, "SLURM_PROCID": "0"})
    assert text.splitlines()[0] == "launcher: Open MPI (because OMPI_COMM_WORLD_RANK is set)"
    assert "  local_rank from OMPI_COMM_WORLD_LOCAL_RANK=0" in text
    for ignored in ("RANK=0", "LOCAL_RANK=0", "WORLD_SIZE=1", "SLURM_PROCID=0"):
        assert f"ignored: {ignored}" in text.splitlines()


def test_explain_does_not_call_ignored_what_it_has_found_the_launcher_by():
    text = explain(TORCHRUN)
    assert "(because TORCHELASTIC_RUN_ID is set)" in text
    assert "ignored" not in text


def test_B07_explain_names_the_slurm_variables_a_plain_run_ignores():
    """https://github.com/Lightning-AI/pytorch-lightning/pull/11406: SLURM_PROCID beats the rank."""
    text = explain(SLURM_SHELL)
    assert text.startswith("launcher: python")
    for name in ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"):
        assert f"ignored: {name}=" in text


def test_detect_writes_nothing():
    environ = dict(OPEN_MPI)
    detect(environ)
    assert environ == OPEN_MPI


@pytest.mark.parametrize("argv", [[], ["--local-rank=1"], ["--local_rank=1"]], ids=str)
def test_B05_both_spellings_of_local_rank_are_accepted_and_neither_is_shown(argv):
    """--local-rank is not known.

    https://github.com/huggingface/pytorch-image-models/issues/1724
    """
    parser = argparse.ArgumentParser()
    add_local_rank_argument(parser)
    parser.parse_args(argv)
    assert "local" not in parser.format_help()
