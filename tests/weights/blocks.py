"""A plain packer of GGUF's block types, round to nearest: the gguf package can dequantize most of them only."""

from collections.abc import Callable

import numpy as np

from penstock.quant.gguf_blocks import BLOCK_TYPES, LEVELS


def pack(array: np.ndarray, type_name: str) -> np.ndarray:
    """float32 [..., K] as blocks uint8 [..., bytes of a row]."""
    known = BLOCK_TYPES[type_name]
    blocks = array.astype(np.float32).reshape(-1, known.size)
    if type_name in _PACKERS:
        made = _PACKERS[type_name](blocks)
    else:
        import gguf  # which machines that only run kernels do not have

        made = gguf.quants.quantize(blocks, gguf.GGMLQuantizationType[type_name])
    assert made.shape == (len(blocks), known.nbytes)
    return made.reshape(*array.shape[:-1], -1)


def some_blocks(rng: np.random.Generator, type_name: str, *shape: int) -> np.ndarray:
    """Random bytes in every field, floats of a moderate size."""
    known = BLOCK_TYPES[type_name]
    *rows, K = shape
    data = rng.integers(0, 256, (*rows, K // known.size, known.nbytes), dtype=np.uint8)
    for at in known.halves:
        data[..., at : at + 2] = rng.uniform(-0.01, 0.01, (*data.shape[:-1], 1)).astype(np.float16).view(np.uint8)
    if type_name == "MXFP4":
        data[..., 0] = rng.integers(116, 124, data.shape[:-1])
    return data.reshape(*rows, -1)


def _ratio(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.divide(a, b, out=np.zeros(np.broadcast(a, b).shape, np.float32), where=b != 0)


def _nearest(values: np.ndarray, low: int, high: int) -> np.ndarray:
    return np.clip(np.rint(values), low, high).astype(np.int16)


def _halves(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[n] as bytes [n, 2], and what they stand for, float32 [n, 1]."""
    half = values.astype("<f2").reshape(-1, 1)
    return half.view(np.uint8), half.astype(np.float32)


def _bytes(*parts: np.ndarray) -> np.ndarray:
    return np.concatenate([part.astype(np.uint8).reshape(len(part), -1) for part in parts], axis=1)


def _with_minima(values: np.ndarray, group: int, top: int, most: int):
    """Bytes of two halves, scales and minima up to `most` of groups, and codes up to `top`."""
    v = values.reshape(len(values), -1, group)
    least = np.maximum(-v.min(axis=2), 0)
    step = (v.max(axis=2).clip(0) + least) / top
    (d_bytes, d), (m_bytes, dm) = _halves(step.max(axis=1) / most), _halves(least.max(axis=1) / most)
    scales, minima = _nearest(_ratio(step, d), 0, most), _nearest(_ratio(least, dm), 0, most)
    codes = _nearest(_ratio(v + (dm * minima)[..., None], (d * scales)[..., None]), 0, top)
    return d_bytes, m_bytes, scales, minima, codes.reshape(len(values), -1)


def _centered(values: np.ndarray, group: int, center: int, most: int):
    """Bytes of a half, scales up to `most` of groups, and codes up to 2 · center − 1."""
    v = values.reshape(len(values), -1, group)
    step = np.abs(v).max(axis=2) / (center - 1)
    d_bytes, d = _halves(step.max(axis=1) / most)
    scales = _nearest(_ratio(step, d), 0, most)
    codes = _nearest(_ratio(v, (d * scales)[..., None]), -center, center - 1) + center
    return d_bytes, scales, codes.reshape(len(values), -1)


def _six_bits(scales: np.ndarray, minima: np.ndarray) -> np.ndarray:
    first, second = scales[:, :4] | (scales[:, 4:] >> 4) << 6, minima[:, :4] | (minima[:, 4:] >> 4) << 6
    return np.concatenate([first, second, (scales[:, 4:] & 15) | (minima[:, 4:] & 15) << 4], axis=1)


def _low_nibbles(codes: np.ndarray) -> np.ndarray:
    pairs = (codes & 15).reshape(len(codes), 4, 2, 32)
    return pairs[:, :, 0] | pairs[:, :, 1] << 4


def _spread(fields: np.ndarray, bits: int) -> np.ndarray:
    """Fields [..., 8 / bits, b] side by side in bytes [..., b]."""
    shifts = np.arange(0, 8, bits)[:, None]
    return (fields.astype(np.int16) << shifts).sum(axis=-2)


def _q4_k(values: np.ndarray) -> np.ndarray:
    d, dm, scales, minima, codes = _with_minima(values, 32, 15, 63)
    return _bytes(d, dm, _six_bits(scales, minima), _low_nibbles(codes))


def _q5_k(values: np.ndarray) -> np.ndarray:
    d, dm, scales, minima, codes = _with_minima(values, 32, 31, 63)
    high = _spread((codes >> 4).reshape(-1, 8, 32), 1)
    return _bytes(d, dm, _six_bits(scales, minima), high, _low_nibbles(codes))


def _q2_k(values: np.ndarray) -> np.ndarray:
    d, dm, scales, minima, codes = _with_minima(values, 16, 3, 15)
    return _bytes(scales | minima << 4, _spread(codes.reshape(-1, 2, 4, 32), 2), d, dm)


def _q3_k(values: np.ndarray) -> np.ndarray:
    d, scales, codes = _centered(values, 16, 4, 31)
    scales = scales + 32
    low = (scales[:, :8] & 15) | (scales[:, 8:] & 15) << 4
    high = _spread((scales >> 4).reshape(-1, 4, 4), 2)
    return _bytes(
        _spread((codes >> 2).reshape(-1, 8, 32), 1), _spread((codes & 3).reshape(-1, 2, 4, 32), 2), low, high, d
    )


def _q6_k(values: np.ndarray) -> np.ndarray:
    d, scales, codes = _centered(values, 16, 32, 127)
    quarters = codes.reshape(-1, 2, 4, 32)
    low = (quarters[:, :, :2] & 15) | (quarters[:, :, 2:] & 15) << 4
    return _bytes(low, _spread(quarters >> 4, 2), scales, d)


def _levels(values: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Codes of groups of 32, two to a byte: [n, 16 · groups]."""
    relative = _ratio(values.reshape(*scales.shape, 32), scales[..., None])
    codes = np.abs(relative[..., None] - LEVELS).argmin(axis=-1)
    return codes[..., :16] | codes[..., 16:] << 4


def _iq4_nl(values: np.ndarray) -> np.ndarray:
    d_bytes, d = _halves(np.abs(values).max(axis=1) / 120)
    return _bytes(d_bytes, _levels(values, d))


def _iq4_xs(values: np.ndarray) -> np.ndarray:
    step = np.abs(values.reshape(-1, 8, 32)).max(axis=2) / 120
    d_bytes, d = _halves(step.max(axis=1) / 31)
    scales = _nearest(_ratio(step, d), 0, 31)
    stored = (scales + 32).astype(np.uint16)
    high = ((stored >> 4) << np.arange(0, 16, 2, dtype=np.uint16)).sum(axis=1).astype("<u2")
    low = (stored & 15)[:, ::2] | (stored & 15)[:, 1::2] << 4
    return _bytes(d_bytes, high.reshape(-1, 1).view(np.uint8), low, _levels(values, d * scales))


_PACKERS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
}
