import math

import pytest
import torch

from ddp_helpers.worker.metrics import all_sum, mean, mean_over_ranks


def test_one_process_without_a_group_sums_to_a_copy_of_its_own_values():
    mine = torch.tensor([1.5, 2.5], requires_grad=True)
    total = all_sum(mine)
    total += 1
    assert mine.tolist() == [1.5, 2.5]
    assert total.dtype == torch.float64
    assert not total.requires_grad


def test_numbers_are_summed_without_losing_digits_of_float32():
    assert all_sum([16_777_217.0, 3]).tolist() == [16_777_217.0, 3.0]


def test_the_mean_of_nothing_is_nan():
    assert math.isnan(mean(0, 0))
    assert math.isnan(mean_over_ranks(0, 0))
    assert mean(3, 2) == 1.5


@pytest.mark.launcher
@pytest.mark.parametrize(
    ("world_size", "total"),
    [(1, [1, 2, 3, 4]), (2, [3, 6, 9, 12]), (4, [10, 20, 30, 40])],
)
def test_B35_every_rank_gets_the_sum_and_keeps_its_own_tensor(worlds, world_size, total):
    """https://github.com/pytorch/pytorch/issues/76527: reduce leaves debris on other ranks."""
    for rank, value in enumerate(worlds("sum_of_tensors", world_size)):
        assert value["total"] == total
        assert value["mine"] == [1 * (rank + 1), 2 * (rank + 1), 3 * (rank + 1), 4 * (rank + 1)]
        assert value["dtype"] == "torch.float64"


@pytest.mark.launcher
def test_a_tensor_that_is_not_contiguous_is_summed_too(worlds):
    assert worlds("sum_of_a_transposed_tensor", 2) == [[[0, 6], [3, 9]]] * 2


@pytest.mark.launcher
@pytest.mark.parametrize(("world_size", "right"), [(2, 1.0), (3, 5 / 3), (4, 14 / 6)])
def test_the_mean_weighs_each_rank_by_its_count(worlds, world_size, right):
    # The mean of the ranks' means would be 1, 1.5 and 2.
    assert worlds("mean_of_uneven_counts", world_size) == [right] * world_size


@pytest.mark.launcher
def test_a_world_that_counted_nothing_has_mean_nan(worlds):
    assert math.isnan(worlds("mean_of_uneven_counts", 1)[0])
