"""The CUDA kernels of collectives over ranks that are threads, as tests/ops/test_collective.py has the others."""

import pytest

from tests.gpu.common import to_device, to_host
from tests.ops.test_collective import check_all_gather, check_all_reduce


@pytest.mark.parametrize("size", [1, 2, 3])
def test_all_reduce_is_the_sum_of_all_ranks(size, rng):
    check_all_reduce("cuda", size, rng, lambda x: to_device(x.copy()), to_host)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_all_gather_has_the_columns_of_all_ranks(size, rng):
    check_all_gather("cuda", size, rng, lambda x: to_device(x.copy()), to_host)
