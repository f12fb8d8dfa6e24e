"""Arguments that nobody means: every op refuses them with one PenstockError, or gives its definition's own result."""

import warnings

import numpy as np
import pytest
import torch

import penstock
from penstock.errors import DTypeError, InvalidArgument, OutOfMemory, PenstockError, ShapeError
from penstock.ops import attention_scores, dequantize, quantized_matmul, residual_add, rms_norm
from penstock.ops.op import REGISTRY
from penstock.quant import ExpertBlobs, QuantizedTensor
from penstock.quant import dequantize as dequantize_whole
from tests.ops.cases import CASES, Case
from tests.ops.common import normal, quantized
from tests.ops.test_cases import written

SMALL: dict[str, Case] = {}  # of each op the case with the least memory, but not an empty one
for _case in CASES:
    if _case.label not in ("empty", "none") and REGISTRY[_case.op].kernel("cpu") is not None:
        SMALL.setdefault(_case.op, _case)

NAN, INF = float("nan"), float("inf")
NUMBERS = (NAN, INF, -INF, 1e308, 1e-320, 1.5, 2**63, 2**63 - 1, -(2**63) - 1, -1, 0, 10**5000, True, None, "x", 1j)
SIZES = {"rope_inv_freq", "proportional_inv_freq", "yarn_inv_freq"}  # make as many numbers as they are told to


def outcome(case: Case, arguments: dict, device: str) -> list[np.ndarray] | None:
    """What a call returns and writes; None if it is refused."""
    op = REGISTRY[case.op]
    try:
        with penstock.backend(device):
            found = op(**arguments)
    except PenstockError:
        return None
    returned = found if isinstance(found, tuple) else (found,)
    return [*(a for a in returned if a is not None), *written(op, arguments)]


def assert_as_defined(case: Case, change) -> None:
    """The kernel and the definition refuse the same, or give the same.

    Where a sum of the definition is no finite number the kernel's is none either; which of NaN and infinity it is
    depends on the order of the sum.
    """
    found = []
    for device in ("cpu", "reference"):
        arguments = case.arguments("float32")
        change(arguments)
        found.append(outcome(case, arguments, device))
    got, want = found
    assert (got is None) == (want is None)
    for a, b in zip(got or (), want or (), strict=True):
        a, b = (array.astype(np.float64) for array in (a, b))
        finite = np.isfinite(b)
        np.testing.assert_array_equal(np.isfinite(a), finite)
        size = np.abs(b[finite]).max(initial=1.0)
        np.testing.assert_allclose(a[finite], b[finite], rtol=1e-3, atol=1e-3 * size)


@pytest.mark.parametrize("name", SMALL)
def test_odd_numbers_are_refused_or_computed_as_defined(name):
    op, case = REGISTRY[name], SMALL[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a number that does not fit is refused, not squeezed in
        for parameter, kinds in zip(op.params, op.kinds, strict=True):
            if kinds & {"int", "float"}:
                for number in NUMBERS:
                    if number != 2**63 - 1 or name not in SIZES:
                        assert_as_defined(case, lambda a, p=parameter, n=number: a.update({p: n}))


@pytest.mark.parametrize("name", SMALL)
def test_arrays_of_nan_and_infinity_are_refused_or_computed_as_defined(name):
    """All of one array, and one number of it: a kernel must not stop, read elsewhere or make a number of them.

    gated_delta_step normalizes what its recurrence gives, where the kernel has an infinity for the definition's sum of
    two opposite ones: NaN alone is compared there.
    """
    case = SMALL[name]
    for parameter, value in case.arguments("float32").items():
        if not isinstance(value, np.ndarray) or value.dtype != np.float32:
            continue
        for number in (NAN,) if name == "gated_delta_step" else (NAN, INF, -INF):
            assert_as_defined(case, lambda a, p=parameter, n=number: a[p].fill(n))
            assert_as_defined(case, lambda a, p=parameter, n=number: a[p].reshape(-1)[-1:].fill(n))


@pytest.mark.filterwarnings("ignore:the matrix subclass")
@pytest.mark.parametrize("name", SMALL)
def test_numpy_arrays_that_mean_more_than_their_memory_are_refused(name):
    case, op = SMALL[name], REGISTRY[name]
    for parameter, value in case.arguments("float32").items():
        if not isinstance(value, np.ndarray):
            continue
        odd = [np.ma.masked_array(value, mask=True), value.view(np.recarray)]
        odd += [np.matrix(value)] if value.ndim == 2 else []
        for array in odd:  # the mask or the fields would be lost, and a matrix has products of its own
            with pytest.raises(DTypeError, match=rf"^{name}: {parameter} is a .*, expected a plain NumPy array"):
                op(**case.arguments("float32") | {parameter: array})


def shrunk() -> torch.Tensor:
    tensor = torch.ones(2, 64)
    tensor.untyped_storage().resize_(0)
    return tensor


class Other(torch.Tensor):
    pass


TENSORS = {
    "sparse": (lambda: torch.ones(2, 64).to_sparse(), "sparse_coo, expected a dense one"),
    "quantized": (lambda: torch.quantize_per_tensor(torch.ones(2, 64), 0.1, 0, torch.quint8), "quantized, expected"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(3), torch.ones(4)]), "nested, expected a dense one"),
    "meta": (lambda: torch.ones(2, 64, device="meta"), "on the device meta, expected one on cpu or cuda"),
    "conjugated": (lambda: torch.ones(2, 64, dtype=torch.complex64).conj(), "expected resolved values"),
    "negated": (lambda: torch.ones(2, 64, dtype=torch.complex64).conj().imag, "expected resolved values"),
    "complex": (lambda: torch.ones(2, 64, dtype=torch.complex64), "dtype complex64, expected float32"),
    "of a class": (lambda: torch.ones(2, 64).as_subclass(Other), "a Other that stands for another tensor"),
    "shrunk": (shrunk, "of 512 bytes on a storage of 0, expected all of its memory"),
    "expanded": (lambda: torch.ones(1, 1).expand(2, 64), "not contiguous"),
}


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.filterwarnings("ignore")
def test_odd_tensors_are_refused(name):
    make, message = TENSORS[name]
    for call in (rms_norm, lambda x: residual_add(torch.ones(2, 64), x)):
        with pytest.raises(InvalidArgument, match=message):
            call(make())
    with pytest.raises(InvalidArgument):
        rms_norm(torch.ones(2, 64), out=make())


def test_a_misaligned_tensor_is_refused():
    memory = np.frombuffer(bytearray(513), np.uint8)[1:].view("f4")
    with pytest.raises(ShapeError, match=r"^rms_norm: x is not aligned in memory"):
        rms_norm(torch.from_numpy(memory))


def test_a_tensor_inside_vmap_is_refused():
    with pytest.raises(DTypeError, match="expected a plain torch tensor"):
        torch.func.vmap(rms_norm)(torch.ones(3, 2, 64))


def test_parameters_and_inference_tensors_are_plain():
    with torch.inference_mode():
        made = torch.ones(2, 64)
    assert torch.equal(rms_norm(made), rms_norm(torch.nn.Parameter(torch.ones(2, 64))))


def test_scalars_that_python_has_no_number_for_are_refused():
    for scalar in (np.longdouble(1e-6), np.clongdouble(1), np.datetime64("NaT"), np.void(b"x"), np.array(1e-6)):
        with pytest.raises(DTypeError, match=r"^rms_norm: eps is .*, expected a float$"):
            rms_norm(np.ones((2, 64), "f4"), None, scalar)


def test_outputs_beyond_memory_are_refused(rng):
    arguments = SMALL["attention_scores"].arguments("float32")
    with pytest.raises(
        ShapeError, match=r"^attention_scores: the output would have shape .*, expected one that memory"
    ):
        attention_scores(**arguments | {"seq_stride": 2**62})
    with pytest.raises(OutOfMemory, match=r"^attention_scores: memory is too short for float32 \(.*1099511627776\)$"):
        attention_scores(**arguments | {"seq_stride": 2**40})


# -- quantized tensors whose arrays are changed in place -------------------------------------------------------------


def reshaped(array):
    array.shape = (array.shape[0] // 2, 2 * array.shape[1])


def restrided(array):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        array.strides = (0, array.itemsize)


def retyped(array):
    array.dtype = np.dtype(f"i{array.itemsize}")


@pytest.mark.parametrize("change", [reshaped, restrided, retyped])
@pytest.mark.parametrize("part", ["packed", "scales", "biases"])
def test_a_shape_changed_behind_a_quantized_tensor_is_seen(rng, change, part):
    w, x = quantized(rng, 8, 64), normal(rng, 3, 64)
    quantized_matmul(x, w)  # all that is remembered of it is remembered now
    change(getattr(w, part))
    for call in (lambda: quantized_matmul(x, w), lambda: dequantize(w), lambda: dequantize_whole(w)):
        with pytest.raises(ShapeError, match=rf"QuantizedTensor: {part} was changed in place to .*, expected it as"):
            call()


@pytest.mark.parametrize(
    "change",
    [
        lambda tensor: tensor.resize_(1, 1),
        lambda tensor: tensor.set_(torch.zeros(1, 1, dtype=tensor.dtype)),
        lambda tensor: setattr(tensor, "data", torch.zeros_like(tensor)),
        lambda tensor: tensor.t_(),
    ],
    ids=["resize", "set", "data", "transpose"],
)
def test_memory_changed_behind_a_quantized_tensor_of_torch_is_seen(rng, change):
    w, x = quantized(rng, 8, 64).to("torch"), torch.ones(3, 64)
    w = w.with_arrays(*(array.clone() for array in w.arrays))  # memory of torch's own, which it can resize
    quantized_matmul(x, w)
    change(w.scales)
    with pytest.raises(ShapeError, match="QuantizedTensor: scales was changed in place to .*, expected it as it was"):
        quantized_matmul(x, w)


@pytest.mark.filterwarnings("ignore:the matrix subclass")
def test_quantized_tensors_are_made_of_plain_arrays(rng):
    w = quantized(rng, 8, 64)
    for odd in (np.ma.masked_array(w.scales), np.matrix(w.scales)):
        with pytest.raises(DTypeError, match="^QuantizedTensor: scales is a .*, expected a plain NumPy array"):
            QuantizedTensor(w.packed, odd, w.biases, w.bits, w.group_size)
    with pytest.raises(DTypeError, match=r"^ExpertBlobs: buffers\[0\] is a MaskedArray, expected a plain NumPy array"):
        ExpertBlobs([np.ma.masked_array(np.zeros(4096, np.uint8))], 0, 2048, 3072, 8, 64, 4, 64)
