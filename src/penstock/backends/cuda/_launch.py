"""What the kernel modules of this backend share: Triton, sizes of launches, device functions that many kernels use."""

import functools
import os
from typing import Any

# Triton 3.9 asks programs to choose whether a product and a sum may round once (fma); so far it did.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from penstock.backends.cuda import _tuning
from penstock.backends.cuda.runtime.triton_cache import use_trusted_cache

INTERPRETED = bool(triton.knobs.runtime.interpret)  # kernels run as Python on torch CPU tensors
if not INTERPRETED:
    use_trusted_cache()  # before anything is compiled or loaded
# The same inside kernels. The interpreter computes with the bits of bfloat16 as if they were integers, and makes
# bfloat16 of float32 by dropping bits: there products take float32 operands, and `_rows.rounded` rounds by itself.
WIDENED = tl.constexpr(INTERPRETED)
TL_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@functools.cache
def _multiprocessors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def multiprocessors(tensor: torch.Tensor) -> int:
    """Multiprocessors of the GPU that holds the tensor; 2 under the interpreter, those of a usual GPU of the kind where
    kernels are only compiled.
    """
    if tensor.is_cuda:
        return _multiprocessors(tensor.device.index)
    return 2 if INTERPRETED else _tuning.gpu(capability(tensor)).multiprocessors


@functools.cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


def capability(tensor: torch.Tensor) -> tuple[int, int]:
    """Compute capability of the GPU that holds the tensor; that of a Hopper under the interpreter, of the target where
    kernels are only compiled.
    """
    if tensor.is_cuda:
        return _capability(tensor.device.index)
    return (9, 0) if INTERPRETED else divmod(triton.runtime.driver.active.get_current_target().arch, 10)


def shared_memory(tensor: torch.Tensor) -> int:
    """KB of shared memory that a block may have on the GPU that holds the tensor: a column of tables in `_tuning`."""
    return _tuning.gpu(capability(tensor)).shared


@functools.cache
def pdl_options() -> dict[str, bool]:
    """What a launch takes whose kernel may start while the one before it ends (PDL): compute capability 9.0 on.

    Such a kernel calls gdc_wait before it reads what the one before writes, and before it writes anything.
    """
    if INTERPRETED or triton.runtime.driver.active.get_current_target().arch < 90:
        return {"PDL": False}
    return {"PDL": True, "launch_pdl": True}


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """First in a kernel: the next one may start, up to its own wait, and this one waits for the end of the one before.

    Every program of a kernel with PDL waits, this way or another: so the end of a kernel is the end of all before it.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()


# Triton spreads what is loaded over lanes, then warps, along the axes in the order of their contiguity. Axes that are
# alike in it came from the first to the last up to 3.6, and come from the last to the first since.
LAST_AXIS_FIRST = tl.constexpr(not INTERPRETED and tuple(map(int, triton.__version__.split(".")[:2])) > (3, 6))


@triton.jit
def load_by_lane(ptr, mask):
    """What pointers [4, 8, S, …] with four to six axes point at, 0 where not mask: lanes along the first two, warps
    along the third, and what is contiguous along the last of five or six axes in one lane.
    """
    ptr, mask = tl.broadcast(ptr, mask)
    if not LAST_AXIS_FIRST:
        y = tl.load(ptr, mask=mask, other=0)
    elif len(ptr.shape) == 4:
        y = tl.load(ptr.permute(3, 2, 1, 0), mask=mask.permute(3, 2, 1, 0), other=0).permute(3, 2, 1, 0)
    elif len(ptr.shape) == 5:
        y = tl.load(ptr.permute(3, 2, 1, 0, 4), mask=mask.permute(3, 2, 1, 0, 4), other=0).permute(3, 2, 1, 0, 4)
    else:
        y = tl.load(ptr.permute(4, 3, 2, 1, 0, 5), mask=mask.permute(4, 3, 2, 1, 0, 5), other=0)
        y = y.permute(4, 3, 2, 1, 0, 5)
    return y


FETCHED = tl.constexpr(2048)  # bytes that a lane of `prefetch_l2` asks for at once


@triton.jit
def prefetch_l2(ptr, nbytes, program, programs, LANES: tl.constexpr):
    """Ask for the first nbytes of an array, a multiple of FETCHED, to come to the L2 cache: the share of one of several
    programs of LANES threads. ptr is aligned to 16 bytes. For compute capability 9.0 on, inside `if PDL`.
    """
    start = ptr.to(tl.pointer_type(tl.uint8), bitcast=True)
    for at in range(program * (LANES * FETCHED), nbytes, programs * (LANES * FETCHED)):
        offset = tl.minimum(at + tl.arange(0, LANES) * FETCHED, nbytes - FETCHED)
        tl.inline_asm_elementwise(
            "cp.async.bulk.prefetch.L2.global [$1], 2048; mov.u32 $0, 0;",
            "=r,l",
            [start + offset],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def prefetch_lines(ptr, numbers, MOST: tl.constexpr):
    """Ask for `numbers` <= MOST numbers from ptr on to come to the L2 cache. What they hold may still change."""
    EACH: tl.constexpr = 1024 // ptr.dtype.element_ty.primitive_bitwidth
    LINES: tl.constexpr = triton.next_power_of_2((MOST + EACH - 1) // EACH)
    pointers = ptr + tl.minimum(tl.arange(0, LINES) * EACH, numbers - 1)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
    )


_COUNTERS = 1 << 16  # made at a time
_free_counters: dict[torch.device, torch.Tensor] = {}
_counters_of: dict[tuple[torch.device, int, int], torch.Tensor] = {}


def reserve_counters(device: torch.device) -> None:
    """Make counters for the calls that are captured next, where none can be made."""
    free = _free_counters.get(device)
    if free is None or len(free) < _COUNTERS // 2:
        _free_counters[device] = torch.zeros(_COUNTERS, dtype=torch.int32, device=device)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()


def counters(out: torch.Tensor, count: int = 1) -> torch.Tensor | None:
    """`count` int32 in device memory that are 0 between launches, by which programs of a launch that writes `out` find
    out which of them is the last, and which that one sets to 0 again. Launches that may run at once write to different
    arrays, so they have different counters. None if they would have to be made while a graph is captured.
    """
    key = out.device, out.data_ptr(), count
    found = _counters_of.get(key)
    if found is None:
        need = -(-count // 4) * 4  # 16 bytes: kernels are compiled for addresses that are multiples of it, or for any
        free = _free_counters.get(out.device)
        if free is None or len(free) < need:
            if need > _COUNTERS or (out.is_cuda and torch.cuda.is_current_stream_capturing()):
                return None
            _free_counters.pop(out.device, None)
            reserve_counters(out.device)
            free = _free_counters[out.device]
        found, _free_counters[out.device] = free[:count], free[need:]
        _counters_of[key] = found
    return found


@functools.lru_cache(maxsize=None, typed=True)
def compiled_for(constants: Any) -> Any:
    """A NamedTuple of what a kernel is compiled for, as its parameter C: each of them a constant, since Triton 3.6 does
    not take the plain integers in a constant for shapes.
    """
    return constants if INTERPRETED else constants._make(c if c is None else tl.constexpr(c) for c in constants)


def flat_rows(x: torch.Tensor) -> torch.Tensor:
    """[..., K] as [T, K] on the same memory."""
    return x.view(-1, x.shape[-1])


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(−x)) of float32, without overflow on either side."""
    small = tl.exp(-tl.abs(x))
    return tl.where(x >= 0, 1.0 / (1.0 + small), small / (1.0 + small))


@triton.jit
def silu(x):
    """x · sigmoid(x) of float32."""
    return x * sigmoid(x)


@triton.jit
def tanh(x):
    """tanh of float32: the odd series near 0, where 1 − exp cancels, else from exp(−2|x|)."""
    a = tl.abs(x)
    small = tl.exp(-2.0 * a)
    far = (1.0 - small) / (1.0 + small)
    s = a * a
    near = a * (1.0 + s * (-0.33333334 + s * (0.13333334 + s * (-0.053968254 + s * 0.021869488))))
    y = tl.where(a < 0.25, near, far)
    return tl.where(x < 0, -y, y)


@triton.jit
def gelu_tanh(x):
    """The tanh form of GELU of float32, by 0.5 · (1 + tanh(u)) = sigmoid(2u), which does not cancel."""
    return x * sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))


@triton.jit
def clamped_swiglu(g, u, limit, alpha):
    """min(g, limit) · σ(alpha · min(g, limit)) · (u between −limit and limit, + 1): the gate of gpt-oss."""
    g = tl.minimum(g, limit, tl.PropagateNan.ALL)
    u = tl.minimum(tl.maximum(u, -limit, tl.PropagateNan.ALL), limit, tl.PropagateNan.ALL)
    return g * sigmoid(alpha * g) * (u + 1.0)


@triton.jit
def activation(x, ACT: tl.constexpr):
    """ACT "silu" or "gelu_tanh"."""
    if ACT == "silu":
        y = silu(x)
    else:
        y = gelu_tanh(x)
    return y
