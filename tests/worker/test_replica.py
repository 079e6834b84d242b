import random

import pytest
import torch
from torch import nn

from ddp_helpers.worker.checks import TrainingError
from ddp_helpers.worker.replica import set_seed, set_threads, wrap

CPU = torch.device("cpu")


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def numbers(seed, rank):
    set_seed(seed, rank)
    return random.random(), torch.rand(()).item()


def test_random_numbers_come_back_with_the_seed_and_differ_between_ranks():
    assert numbers(1, 0) == numbers(1, 0)
    assert len({numbers(1, rank) for rank in range(4)}) == 4


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(("cores", "ranks", "expected"), [(8, 2, 4), (3, 2, 1), (2, 4, 1)])
def test_ranks_share_the_cores_of_their_node(monkeypatch, cores, ranks, expected):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(cores)), raising=False)
    set_threads(ranks)
    assert torch.get_num_threads() == expected


@pytest.mark.usefixtures("threads")
def test_a_number_of_threads_that_was_set_stays(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    before = torch.get_num_threads()
    set_threads(1000)
    assert torch.get_num_threads() == before


@pytest.mark.usefixtures("group_of_one")
def test_B38_a_model_on_the_cpu_is_wrapped_without_device_ids():
    """https://github.com/pytorch/pytorch/issues/100243: device_ids for a model on the CPU."""
    model = wrap(nn.Linear(2, 2), CPU)
    assert model.device_ids is None
    assert not model.find_unused_parameters


@pytest.mark.usefixtures("group_of_one")
def test_compiling_and_channels_last_leave_the_names_of_parameters():
    model = nn.Sequential(nn.Conv2d(3, 4, 3))
    wrapped = wrap(model, CPU, channels_last=True, compile=True, find_unused_parameters=True)
    assert [name for name, _ in wrapped.named_parameters()] == [
        "module.0.weight",
        "module.0.bias",
    ]
    assert wrapped.module._compiled_call_impl is not None
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert wrapped.find_unused_parameters


@pytest.mark.usefixtures("group_of_one")
def test_sync_bn_on_a_cpu_is_refused_before_training():
    with pytest.raises(TrainingError, match="GPUs only"):
        wrap(nn.BatchNorm2d(3), CPU, sync_bn=True)


@pytest.mark.launcher
def test_ranks_start_from_the_parameters_of_rank_0(worlds):
    (first, first_hash), (second, second_hash) = worlds("replicas_after_different_seeds", 2)
    assert first != second
    assert first_hash == second_hash


@pytest.mark.cuda
def test_the_same_call_wraps_a_model_on_a_gpu(group_of_one):
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    model = wrap(nn.Sequential(nn.BatchNorm1d(2)), torch.device("cuda", 0), sync_bn=True)
    assert model.device_ids == [0]
    assert isinstance(model.module[0], nn.SyncBatchNorm)
