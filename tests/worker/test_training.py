import itertools
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import ddp_helpers.worker.training as training
from ddp_helpers.worker.training import evaluate, set_epoch, train_one_epoch

CPU = torch.device("cpu")
launcher = pytest.mark.launcher


def small_run(images=5, batch_size=2, **options):
    """Train a linear model for one epoch in this process; return the model and the result."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 10))
    dataset = TensorDataset(torch.randn(images, 3, 2, 2), torch.randint(10, (images,)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = DataLoader(dataset, batch_size)
    return model, train_one_epoch(model, loader, optimizer, CPU, 0, **options)


def test_throughput_counts_every_image_of_the_short_last_batch(monkeypatch):
    clock = itertools.count(step=2.0)
    monkeypatch.setattr(training.time, "perf_counter", lambda: next(clock))
    _, result = small_run(images=5, batch_size=2)
    assert result.images_per_s == 5 / 2.0


def test_the_loss_is_the_mean_over_images_not_over_batches():
    _, by_two = small_run(images=5, batch_size=2, accumulate=3)  # one step: nothing moves between
    _, at_once = small_run(images=5, batch_size=5)
    assert by_two.loss == pytest.approx(at_once.loss, rel=1e-6)
    assert by_two.accuracy == at_once.accuracy


def test_accumulated_batches_make_the_step_of_one_big_batch():
    by_two, _ = small_run(images=5, batch_size=2, accumulate=3)
    at_once, _ = small_run(images=5, batch_size=5)
    torch.testing.assert_close(by_two[1].weight, at_once[1].weight)


def test_the_scheduler_moves_once_per_step(monkeypatch):
    steps = []

    class Scheduler:
        def step(self):
            steps.append(1)

    small_run(images=5, batch_size=1, accumulate=2, scheduler=Scheduler())
    assert len(steps) == 3


@pytest.mark.parametrize("amp", ["bf16", "fp16"])
def test_mixed_precision_gives_nearly_the_step_of_float32(amp):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=amp == "fp16")
    mixed, _ = small_run(amp=amp, scaler=scaler)
    plain, _ = small_run()
    assert mixed[1].weight.dtype == torch.float32
    torch.testing.assert_close(mixed[1].weight, plain[1].weight, atol=5e-3, rtol=0)
    assert not torch.equal(mixed[1].weight, plain[1].weight)


def test_the_loop_shows_its_batches_to_progress():
    shown = []

    def progress(batches):
        for batch in batches:
            shown.append(len(batch[1]))
            yield batch

    small_run(images=5, batch_size=2, progress=progress)
    assert shown == [2, 2, 1]


def sampled_loader():
    dataset = TensorDataset(torch.zeros(4, 12), torch.zeros(4, dtype=torch.long))
    return DataLoader(dataset, 2, sampler=DistributedSampler(dataset, 1, 0))


def test_B31_an_epoch_that_never_moves_is_warned_of_once():
    """https://github.com/pytorch/pytorch/issues/31771: the same order in every epoch."""
    loader = sampled_loader()
    set_epoch(loader, 0)
    with pytest.warns(UserWarning, match="epoch is 0 for the second time"):
        set_epoch(loader, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        set_epoch(loader, 0)
        set_epoch(loader, 0)


def test_epochs_that_move_and_samplers_without_one_are_not_warned_of():
    loader = sampled_loader()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for epoch in range(3):
            set_epoch(loader, epoch)
            set_epoch(DataLoader([1, 2]), 0)
    assert loader.sampler.epoch == 2


def test_evaluating_nothing_is_nan_and_leaves_the_mode_of_the_model():
    model = nn.Linear(2, 2).eval()
    assert str(evaluate(model, [], CPU)) == "nan"
    assert not model.training


@launcher
@pytest.mark.parametrize("check", ["gradients", "accumulated_gradients"])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_gradients_of_n_ranks_equal_one_process_with_the_same_global_batch(
    worlds, check, world_size
):
    for difference in worlds(check, world_size):
        assert difference < 1e-13


@launcher
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_evaluation_is_exact_on_uneven_and_empty_ranks(worlds, world_size):
    for value in worlds("exact_accuracy", world_size):
        assert value == {"found": [2 / 3, 4 / 5], "still training": True}


@launcher
def test_B33_a_rank_with_a_batch_more_stops_all_ranks_at_once(worlds):
    """https://github.com/pytorch/pytorch/issues/38174: one rank has a batch more."""
    for value in worlds("uneven_loaders", 2):
        assert "rank 0: 3, rank 1: 2" in value["error"]
        assert value["seconds"] < 5


@launcher
def test_loss_accuracy_and_throughput_are_those_of_all_ranks(worlds):
    first, second = worlds("figures_over_all_ranks", 2)
    assert first["accuracy"] == second["accuracy"] == 0.5
    assert first["loss"] == second["loss"] == pytest.approx(50, abs=1)
    for value in (first, second):
        assert 8 <= value["images"] < 16  # 8 images, and the call took a little longer
