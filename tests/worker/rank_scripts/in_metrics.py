"""Sums and means over ranks."""

import torch

from ddp_helpers.worker.metrics import all_sum, mean_over_ranks


def sum_of_tensors(rank, world_size, folder):
    mine = torch.tensor([1, 2, 3, 4]) * (rank + 1)
    total = all_sum(mine)
    return {"total": total.tolist(), "mine": mine.tolist(), "dtype": str(total.dtype)}


def sum_of_a_transposed_tensor(rank, world_size, folder):
    return all_sum(torch.arange(4.0).reshape(2, 2).T * (rank + 1)).tolist()


def mean_of_uneven_counts(rank, world_size, folder):
    # Rank r counts r values that are all r: rank 0 none.
    return mean_over_ranks(total=rank * rank, count=rank)


WORLDS = {
    sum_of_tensors: (1, 2, 4),
    sum_of_a_transposed_tensor: (2,),
    mean_of_uneven_counts: (1, 2, 3, 4),
}
