"""A GPU as a device: torch tensors, Triton kernels, CUDA graphs; for the interpreter, host memory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from itertools import accumulate
from typing import Any

import numpy as np

from penstock.backends.cuda.runtime import bandwidth
from penstock.backends.cuda.runtime.features import interpreted, unusable
from penstock.errors import BackendError, OutOfMemory
from penstock.ops.array import Spec, numpy_view, shaped
from penstock.ops.device import register_device
from penstock.ops.op import backend
from penstock.quant import GgufTensor, QuantizedTensor, in_planes, to_torch
from penstock.units import amount


class CudaDevice:
    """The current CUDA device."""

    name = "cuda"
    memory_name = "GPU memory"
    host_memory = False
    runs_programs = True
    samples_tokens = True
    fixed_caches = True
    joins = 256
    captures = True
    default_dtype, default_activations = "bfloat16", "float32"
    state_dtypes: tuple[str, ...] = ("float32", "bfloat16")
    default_sequences = 32
    compiles_ahead = False
    # larger chunks read the weights less often: 46 000 tokens/s on an H200 with 2048, 15 000 with 256
    chunk_alignment = 2048

    def __init__(self) -> None:
        self.interpreted = interpreted()
        if not self.interpreted and (why := unusable()) is not None:
            raise BackendError(f"load: device is 'cuda', expected 'cpu': {why}")
        import torch

        self._torch = torch
        self._keeper: Any = None
        self._stream: Any = None  # that captures
        index = None if self.interpreted else torch.cuda.current_device()
        self.torch_device = torch.device("cpu") if index is None else torch.device("cuda", index)

    @staticmethod
    def set_threads(count: int) -> None:
        pass

    @staticmethod
    def threads() -> int:
        return 1

    def to_device(self, value: Any) -> Any:
        with self._memory_errors():
            if isinstance(value, GgufTensor):
                return in_planes(value, "torch" if self.interpreted else str(self.torch_device))
            if isinstance(value, QuantizedTensor):
                return value.with_arrays(*map(self._tensor, value.arrays))
            return self._tensor(value)

    def _tensor(self, array: Any) -> Any:
        if not isinstance(array, self._torch.Tensor):
            array = to_torch(array, "torch")
        return array.to(self.torch_device)  # itself if it is here

    def to_host(self, array: Any) -> np.ndarray:
        return numpy_view(array.clone() if self.interpreted else array.cpu())

    def rows_to_host(self, array: Any, rows: Seq[int]) -> Callable[[], np.ndarray]:
        found = self.pinned((len(rows), *array.shape[1:]), array.dtype)
        for target, row in zip(found, rows, strict=True):
            target.copy_(array[row], non_blocking=True)
        done = self.event()

        def waited() -> np.ndarray:
            done()
            return numpy_view(found)

        return waited

    def zeros(self, shape: tuple[int, ...], dtype: str) -> Any:
        kind = getattr(self._torch, dtype)
        if self.interpreted:  # NumPy's take memory when they are written: caches are large, and most of them stay empty
            return self._torch.from_numpy(np.zeros(shape, f"i{kind.itemsize}")).view(kind)
        with self._memory_errors():
            return self._torch.zeros(shape, dtype=kind, device=self.torch_device)

    def most_rows(self, nbytes: int) -> int:
        return 0

    def reserve(self, shape: tuple[int, ...], dtype: str) -> Any:
        return self.zeros(shape, dtype)

    def random_codes(self, shape: tuple[int, ...], seed: int) -> Any:
        """int32, every bit drawn: the packed codes of a made-up quantized tensor."""
        with self._memory_errors():
            generator = self._torch.Generator(self.torch_device).manual_seed(seed)
            codes = self._torch.empty(shape, dtype=self._torch.int32, device=self.torch_device)
            return codes.random_(-(2**31), 2**31, generator=generator)

    def copy(self, array: Any) -> Any:
        with self._memory_errors():
            return array.clone()

    def copies(self, arrays: Seq[Any]) -> list[Any]:
        with self._memory_errors():
            found = [self._torch.empty_like(array) for array in arrays]
        self.copy_all(found, arrays)
        return found

    def clear_all(self, arrays: Seq[Any]) -> None:
        if arrays:
            self._torch._foreach_zero_(list(arrays))

    def copy_all(self, into: Seq[Any], arrays: Seq[Any]) -> None:
        if into:
            self._torch._foreach_copy_(list(into), list(arrays))

    def inputs(self, wanted: Seq[tuple[tuple[int, ...], str]]) -> _PinnedInputs:
        """Small arrays of these shapes and dtypes that the host fills and sends."""
        return _PinnedInputs(self, wanted)

    def arena(self, nbytes: int) -> Any:
        with self._memory_errors():
            return self._torch.empty(nbytes, dtype=self._torch.uint8, device=self.torch_device)

    def compile(self, calls: Seq[Callable[[], object]]) -> None:
        if not self.interpreted:
            from penstock.backends.cuda.runtime.compile import compile_all

            compile_all(calls)

    def capture(self, calls: Seq[Callable[[], object]]) -> Callable[[], object]:
        """The calls as one CUDA graph; the graphs share a pool for their scratch memory, since one runs at a time."""
        torch = self._torch
        if self.interpreted:
            kept = tuple(calls)
            return lambda: [call() for call in kept]
        from penstock.backends.cuda._launch import reserve_counters

        if self._keeper is None:
            self._keeper = torch.cuda.CUDAGraph()  # torch gives a pool up when the last graph in it has gone
            self._stream = torch.cuda.Stream(self.torch_device)
            self._captured(self._keeper, None, [lambda: torch.zeros(1, device=self.torch_device)])
        reserve_counters(self.torch_device)
        graph = torch.cuda.CUDAGraph()
        self._captured(graph, self._keeper.pool(), calls)
        return graph.replay

    def _captured(self, graph: Any, pool: Any, calls: Seq[Callable[[], object]]) -> None:
        """Without what `torch.cuda.graph` does before: collecting garbage and giving cached memory back take longer."""
        cuda = self._torch.cuda
        self._stream.wait_stream(cuda.current_stream())
        with self._memory_errors(), cuda.stream(self._stream):
            graph.capture_begin(**({} if pool is None else {"pool": pool}), capture_error_mode="thread_local")
            try:
                for call in calls:
                    call()
            finally:
                graph.capture_end()
        cuda.current_stream().wait_stream(self._stream)

    def wait(self) -> None:
        if not self.interpreted:
            self._torch.cuda.synchronize(self.torch_device)

    def lost(self, error: BaseException) -> bool:
        """A CUDA error that is not a lack of memory stays with the process."""
        memory = isinstance(error, self._torch.OutOfMemoryError | OutOfMemory)
        return isinstance(error, RuntimeError) and "CUDA error" in str(error) and not memory

    def event(self) -> Callable[[], object]:
        if self.interpreted:
            return self.wait
        done = self._torch.cuda.Event()
        done.record()
        return done.synchronize

    def step_inputs(self, wanted: Mapping[str, tuple[tuple[int, ...], str]], slots: int) -> Any:
        from penstock.backends.cuda.runtime.inputs import StepInputs
        from penstock.backends.cuda.runtime.sampler import SAMPLING_INPUTS

        rows = wanted["wanted"][0]
        sampling = {name: (rows, dtype) for name, dtype in SAMPLING_INPUTS.items()}
        with self._memory_errors():
            return StepInputs(self, {**wanted, **sampling}, slots)

    def sampler(self, inputs: Any, vocab: int) -> Any:
        from penstock.backends.cuda.runtime.sampler import DeviceSampler

        with self._memory_errors():
            return DeviceSampler(self, inputs, vocab)

    def expert_tier(self, host: str, top_k: int) -> Any:
        from penstock.backends.cuda.runtime.experts import GpuTier

        return GpuTier(self, host, top_k)

    def miss_detector(self, tier: Any, layers: int, width: int, sums: str | None = None) -> Any:
        from penstock.backends.cuda.runtime.experts import MissDetector

        return MissDetector(self, tier, layers, width, sums)

    def expert_room(self, pairs: tuple[int, int], experts: int, x: Any, block: bool) -> Any:
        from penstock.backends.cuda.moe import expert_room

        with self._memory_errors():
            return expert_room(pairs, experts, x, block)

    def pinned(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Host memory that kernels can read and write."""
        try:
            return self._torch.zeros(shape, dtype=dtype, pin_memory=not self.interpreted)
        except RuntimeError as error:
            raise OutOfMemory(f"pinned memory: {error}; use a smaller expert_host") from None

    def free_memory(self, share: float = 1.0) -> int:
        if self.interpreted:
            from penstock.machine import memory

            return memory(reclaim=True)[1]
        cuda = self._torch.cuda
        own = cuda.memory_allocated(self.torch_device)
        free, total = cuda.mem_get_info(self.torch_device)
        free += cuda.memory_reserved(self.torch_device) - own  # what torch keeps for the next allocations
        return free if share == 1 else max(0, min(free, int(share * total) - own))

    def peak_memory(self) -> int:
        return 0 if self.interpreted else self._torch.cuda.max_memory_allocated(self.torch_device)

    def copy_rate(self) -> float | None:
        return bandwidth.copy_rate()

    def link_rate(self) -> float | None:
        return bandwidth.link_rate()

    @contextlib.contextmanager
    def running(self, deterministic: bool) -> Iterator[None]:
        with self._memory_errors(), backend("cuda" if self.interpreted else "auto", deterministic=deterministic):
            yield

    @contextlib.contextmanager
    def _memory_errors(self) -> Iterator[None]:
        try:
            yield
        except self._torch.OutOfMemoryError as error:
            raise OutOfMemory(
                f"GPU memory: an allocation failed with {amount(self.free_memory())} free; "
                "use a shorter context, fewer sequences, or device='cpu'"
            ) from error


class _PinnedInputs:
    """One block of pinned memory and one on the GPU; `send` is one copy between them."""

    def __init__(self, gpu: CudaDevice, wanted: Seq[tuple[tuple[int, ...], str]]) -> None:
        torch = gpu._torch
        specs = [Spec(shape, dtype) for shape, dtype in wanted]
        ends = list(accumulate(-(-spec.nbytes // 16) * 16 for spec in specs))
        self._bytes = torch.zeros(max([16, *ends[-1:]]), dtype=torch.uint8, device=gpu.torch_device)
        self._staged = self._bytes if gpu.interpreted else torch.zeros_like(self._bytes, device="cpu").pin_memory()
        self._gone = None if gpu.interpreted else torch.cuda.Event()
        starts = [0, *ends][: len(specs)]
        parts = [slice(start, start + spec.nbytes) for start, spec in zip(starts, specs, strict=True)]
        self.on_device = [shaped(self._bytes[part], spec) for part, spec in zip(parts, specs, strict=True)]
        self.host = [numpy_view(shaped(self._staged[part], spec)) for part, spec in zip(parts, specs, strict=True)]

    def send(self) -> None:
        if self._gone is not None:
            self._bytes.copy_(self._staged, non_blocking=True)
            self._gone.record()

    def ready(self) -> None:
        if self._gone is not None:
            self._gone.synchronize()


register_device(CudaDevice)
