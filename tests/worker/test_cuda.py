"""On one GPU: nccl, the device of a local rank, a training step. Two minutes at most.

python -m pytest -m cuda tests/worker/test_cuda.py
"""

import pytest
import torch
import torch.distributed as dist

from ddp_helpers.results import read_results
from ddp_helpers.scripts import message_passing, train_resnet
from ddp_helpers.worker.environment import LaunchEnvironment, LaunchEnvironmentError
from ddp_helpers.worker.process_group import process_group

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that torch can use"),
]


def test_nccl_and_the_gpu_of_local_rank_0_are_chosen():
    with process_group(LaunchEnvironment("python"), timeout_s=60) as device:
        assert device == torch.device("cuda", 0)
        assert torch.cuda.current_device() == 0
        assert dist.get_backend() == "nccl"
        total = torch.full((4,), 3.0, device=device)
        dist.all_reduce(total)
        assert total.tolist() == [3.0] * 4
    assert not dist.is_initialized()


def test_gloo_on_a_machine_with_a_gpu_stays_on_the_cpu():
    with process_group(LaunchEnvironment("python"), "gloo", timeout_s=60) as device:
        assert device == torch.device("cpu")


def test_more_local_ranks_than_gpus_is_an_error_before_waiting():
    devices = torch.cuda.device_count()
    env = LaunchEnvironment("environment", devices, devices + 1, devices, devices + 1)
    message = f"local rank {devices} needs cuda:{devices}, but {devices} CUDA device"
    with pytest.raises(LaunchEnvironmentError, match=message), process_group(env):
        pass
    assert not dist.is_initialized()


def test_the_scripts_run_on_the_gpu(tmp_path):
    message_passing.main(["--result_dir", str(tmp_path / "message"), "--gather_results"])
    assert read_results(tmp_path / "message")[0]["backend"] == "nccl"
    options = ["--epochs=3", "--amp=bf16", "--channels_last"]
    train_resnet.main([*options, "--result_dir", str(tmp_path / "train")])
    (result,) = read_results(tmp_path / "train")
    assert result["backend"] == "nccl"
    assert result["accuracy"] > 0.5
    assert torch.cuda.max_memory_allocated() > 0
