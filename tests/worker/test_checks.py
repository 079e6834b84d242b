import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ddp_helpers.worker.checks import parameters_hash, unused_parameters

launcher = pytest.mark.launcher


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model[0].weight.data.mul_(1.0000002),
        lambda model: model[0].bias.data.neg_(),
        lambda model: model.to(torch.float64),
    ],
    ids=["one bit of a weight", "a sign", "the type"],
)
def test_the_hash_sees(change):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4))
    before = parameters_hash(model)
    change(model)
    assert parameters_hash(model) != before


def test_the_hash_does_not_see_buffers_or_the_memory_format():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    before = parameters_hash(model)
    model[1].running_mean += 1
    assert parameters_hash(model.to(memory_format=torch.channels_last)) == before


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16, torch.int64])
def test_every_type_of_parameter_can_be_hashed(kind):
    model = nn.Module()
    model.scale = nn.Parameter(torch.tensor(3).to(kind), requires_grad=False)
    model.nothing = nn.Parameter(torch.empty(0, dtype=kind), requires_grad=False)
    assert len(parameters_hash(model)) == 64


def test_frozen_parameters_do_not_count_as_unused():
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2), "c": nn.Linear(2, 2)})
    model["c"].requires_grad_(False)
    loss = model["a"](torch.ones(1, 2)).sum()
    assert unused_parameters(model, loss) == ["b.weight", "b.bias"]


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputed_layers_do_not_count_as_unused(use_reentrant):
    model = nn.Linear(2, 2)
    x = torch.ones(1, 2, requires_grad=True)
    loss = checkpoint(model, x, use_reentrant=use_reentrant).sum()
    assert unused_parameters(model, loss) == []


@launcher
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_equal_replicas_have_one_hash_wrapped_or_not(worlds, world_size):
    hashes = {text for pair in worlds("hash_of_equal_replicas", world_size) for text in pair}
    assert len(hashes) == 1
    assert len(hashes.pop()) == 64


@launcher
@pytest.mark.parametrize(("world_size", "ranks"), [(2, "rank 1"), (4, "ranks 1 and 3")])
def test_the_first_parameter_that_differs_is_named_on_every_rank(worlds, world_size, ranks):
    text = f"TrainingError: 2.weight is not the same on rank 0 and on {ranks}."
    for value in worlds("one_replica_differs", world_size):
        assert value["error"].startswith(text)


@launcher
def test_every_rank_hears_that_one_has_a_batch_more(worlds):
    for value in worlds("uneven_lengths", 2):
        assert "(rank 0: 3, rank 1: 2)" in value["error"]
        assert "DistributedSampler" in value["error"]
        assert "Join" in value["error"]
    assert worlds("equal_lengths", 2) == [None, None]


@launcher
@pytest.mark.parametrize(
    ("check", "world_size", "ranks"),
    [
        ("unused_on_all_ranks", 1, "rank 0"),
        ("unused_on_all_ranks", 2, "ranks 0 and 1"),
        ("unused_on_rank_0", 2, "rank 0"),
    ],
)
def test_B36_a_parameter_without_gradient_is_named_on_every_rank(worlds, check, world_size, ranks):
    """https://github.com/pytorch/pytorch/issues/68862: reduction of the prior iteration."""
    text = f"TrainingError: b.weight, b.bias got no gradient on {ranks}"
    for value in worlds(check, world_size):
        assert value["error"].startswith(text)


@launcher
def test_parameters_may_be_unused_when_ddp_was_told_so(worlds):
    assert worlds("unused_as_asked_for", 2) == [None, None]
