"""Heads that draft on the GPU: against the definitions, in ragged steps and one token of each sequence."""

import numpy as np
import pytest

from tests.models.common import error, some_tokens
from tests.models.heads import Drafter
from tests.models.test_mtp import FAMILIES, random_head, rows


def check(name: str) -> None:
    reference = Drafter(*random_head(name, "reference"), "reference", sequences=2)
    gpu = Drafter(*random_head(name, "cuda", dtype="float32"), "cuda", sequences=2)
    tokens, dim = some_tokens(20, seed=6), reference.head.config.dim
    for number, runs in enumerate(({1: (0, tokens[:9]), 0: (0, tokens[9:11])}, {0: (2, tokens[11:12]), 1: (9, [4])})):
        hidden = rows(sum(len(run) for _, run in runs.values()), dim, number)
        for got, want in zip(gpu(runs, hidden), reference(runs, hidden), strict=True):
            assert error(np.asarray(got), want) <= 5e-5


@pytest.mark.cuda
@pytest.mark.parametrize("name", FAMILIES)
def test_cuda_head_matches_the_definitions(name):
    check(name)


@pytest.mark.parametrize("name", ["moe", "deepseek"])
def test_head_in_the_interpreter_matches_the_definitions(name):
    check(name)
