"""What the host gives to a step: one copy to the GPU, laid out there by a kernel that is captured with the step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from penstock.backends.cuda._launch import pdl_options, wait_for_previous
from penstock.ops.array import Spec, numpy_view, shaped

_ENTRY = 6  # words of an array's entry: from, count, to, columns, stride, and below what a number names a slot
_NEVER = -(1 << 31)
_PARTS = 8  # programs for an array


# unpack    word i of array a goes to its place: row i // columns, column i % columns of rows of `stride` words; one
#           below `above` is −2 − s and becomes last[s]
# shapes    packed int32: an entry of _ENTRY words for each array, then the words; arrays int32; last int32 [slots]
# grid      (arrays, _PARTS)
# bytes     8 * words
# limits    none
@triton.jit
def _unpack_kernel(packed_ptr, arrays_ptr, last_ptr, ENTRY: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    wait_for_previous(PDL)
    entry = packed_ptr + tl.program_id(0) * ENTRY
    begin, count, to = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    columns, stride, above = tl.load(entry + 3), tl.load(entry + 4), tl.load(entry + 5)
    for start in range(tl.program_id(1) * BLOCK, count, tl.num_programs(1) * BLOCK):
        i = start + tl.arange(0, BLOCK)
        live = i < count
        x = tl.load(packed_ptr + begin + i, mask=live, other=0)
        drawn = live & (x < above)
        x = tl.where(drawn, tl.load(last_ptr + tl.where(drawn, -2 - x, 0), mask=drawn, other=0), x)
        tl.store(arrays_ptr + to + i // columns * stride + i % columns, x, mask=live)


class StepInputs:
    """See `ops.device`. Arrays of 8-byte numbers are words of them, two each."""

    def __init__(self, gpu: Any, wanted: Mapping[str, tuple[tuple[int, ...], str]], slots: int) -> None:
        specs = {name: Spec(shape, dtype) for name, (shape, dtype) in wanted.items()}
        self._number = {name: n for n, name in enumerate(specs)}
        self._at: dict[str, int] = {}
        self._columns: dict[str, int] = {}
        end = 0
        for name, spec in specs.items():
            self._at[name], self._columns[name] = end, spec.shape[-1] if spec.ndim > 1 else 0
            end += -(-spec.nbytes // 16) * 4
        head = _ENTRY * len(specs)
        self.last = gpu.zeros((slots,), "int32")
        self._arrays = gpu.zeros((end,), "int32")
        self._packed = gpu.zeros((head + end,), "int32")
        self._staged = self._packed if gpu.interpreted else torch.zeros_like(self._packed, device="cpu").pin_memory()
        self._host = numpy_view(self._staged)
        self._entries = self._host[:head].reshape(-1, _ENTRY)
        self._gone = None if gpu.interpreted else torch.cuda.Event()
        words = self._arrays.view(torch.uint8)
        self.on_device = {
            name: shaped(words[4 * self._at[name] : 4 * self._at[name] + spec.nbytes], spec)
            for name, spec in specs.items()
        }

    def send(self, values: Mapping[str, np.ndarray]) -> None:
        if self._gone is not None:
            self._gone.synchronize()  # what was sent before has left
        entries, end = self._entries, self._entries.size
        entries[:, 1] = 0
        for name, value in values.items():
            words = value.reshape(-1).view(np.int32)
            columns = self._columns[name]
            width = (value.shape[1], columns) if columns else (max(1, words.size), 0)
            entries[self._number[name]] = end, words.size, self._at[name], *width, -1 if name == "tokens" else _NEVER
            self._host[end : end + words.size] = words
            end += words.size
        if self._gone is not None:
            self._packed[:end].copy_(self._staged[:end], non_blocking=True)
            self._gone.record()

    def unpack(self) -> None:
        _unpack_kernel[(len(self._number), _PARTS)](
            self._packed, self._arrays, self.last, ENTRY=_ENTRY, BLOCK=256, num_warps=2, **pdl_options()
        )
