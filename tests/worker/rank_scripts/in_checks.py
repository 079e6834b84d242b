"""What all ranks must have in common."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_helpers.worker.checks import (
    check_all_parameters_used,
    check_equal_lengths,
    check_equal_replicas,
    parameters_hash,
)


def equal_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def hash_of_equal_replicas(rank, world_size, folder):
    model = equal_model()
    model[1].running_mean += rank  # as after a step: only parameters are kept equal
    wrapped = DDP(model, broadcast_buffers=False)
    check_equal_replicas(wrapped)
    return [parameters_hash(wrapped), parameters_hash(model)]


def one_replica_differs(rank, world_size, folder):
    model = equal_model()
    if rank % 2 == 1:
        with torch.no_grad():
            model[2].weight[0, 0] += 1e-7
            model[2].bias += 1
    check_equal_replicas(model)


def uneven_lengths(rank, world_size, folder):
    check_equal_lengths(range(3 - rank))


def equal_lengths(rank, world_size, folder):
    return check_equal_lengths(range(3))


class HalfUsed(nn.Module):
    """Rank 0 never uses b; other ranks only when told to."""

    def __init__(self, uses_b):
        super().__init__()
        self.a, self.b, self.uses_b = nn.Linear(2, 2), nn.Linear(2, 2), uses_b

    def forward(self, x):
        return self.b(self.a(x)) if self.uses_b else self.a(x)


def loss_of(uses_b, **options):
    model = DDP(HalfUsed(uses_b), **options)
    return model, model(torch.ones(1, 2)).sum()


def unused_on_all_ranks(rank, world_size, folder):
    check_all_parameters_used(*loss_of(uses_b=False))


def unused_on_rank_0(rank, world_size, folder):
    check_all_parameters_used(*loss_of(uses_b=rank > 0))


def unused_as_asked_for(rank, world_size, folder):
    return check_all_parameters_used(*loss_of(uses_b=False, find_unused_parameters=True))


WORLDS = {
    hash_of_equal_replicas: (1, 2, 4),
    one_replica_differs: (2, 4),
    uneven_lengths: (2,),
    equal_lengths: (1, 2),
    unused_on_all_ranks: (1, 2),
    unused_on_rank_0: (2,),
    unused_as_asked_for: (2,),
}
