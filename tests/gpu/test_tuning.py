"""The tables of launches: every kind of GPU has a column, and what a column says fits its shared memory."""

import pytest

from penstock.backends.cuda._tuning import ATTEND, GPUS, Gpu, gpu

KEYS = {128: (128, 128), 256: (256, 256), 512: (512, 512)}  # widest key and value of a row up to this width


@pytest.mark.parametrize(
    ("capability", "name"),
    [((8, 0), "A100"), ((8, 7), "RTX 3090"), ((9, 0), "H100, H200"), ((10, 3), "B200"), ((13, 0), "RTX 5090")],
)
def test_gpu_is_the_last_one_known(capability: tuple[int, int], name: str) -> None:
    assert gpu(capability).name == name


def test_only_one_gpu_was_measured() -> None:
    assert [about.name for about in GPUS.values() if about.measured] == ["H100, H200"]


@pytest.mark.parametrize(
    "about", [about for about in GPUS.values() if about.shared < 227], ids=lambda about: about.name
)
@pytest.mark.parametrize("row", [row for row in ATTEND if not row.exact], ids=str)
def test_attend_fits_a_gpu_without_hoppers_instructions(row, about: Gpu) -> None:
    """By the formula above the table, which is what Triton takes."""
    M, N, _, stages = row.sizes(about.shared)
    key, value = KEYS.get(row.wide, (576, 512))
    values = 0 if row.latent else min(value, row.values)  # latents are keys and values at once
    assert 2 * (M * key + (stages - 1) * N * (key + values) + M * N) <= about.shared << 10
