"""Helpers for writing and launching multi-node PyTorch DDP jobs.

launch/   the machine you type on: hosts, launch plans, a runner
worker/   inside every rank: who am I, process group, data, training, checkpoint
lesson/   inside a notebook: MPI engines, source and diffs, pictures, exercise checks
scripts/  what launchers start: message_passing, train_resnet
"""
