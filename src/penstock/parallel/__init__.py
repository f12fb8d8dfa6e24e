"""Ranks of one model: processes on this machine or on several, joined by torch.distributed."""

from penstock.models.split import Mesh
from penstock.parallel.group import RankGroup
from penstock.parallel.launch import RankOptions, joined_by_torchrun, start_ranks

__all__ = ["Mesh", "RankGroup", "RankOptions", "joined_by_torchrun", "start_ranks"]
