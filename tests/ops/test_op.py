"""The op framework: binding, checks, `out=`, devices, kernels, symbols."""

import re
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

import penstock
from penstock import ops
from penstock.dtypes import bfloat16
from penstock.errors import BackendError, DTypeError, InvalidArgument, KernelNotFound, PenstockError, ShapeError
from penstock.ops import check, residual_add, residual_norm, rms_norm
from penstock.ops.array import Array, Spec, Symbol, numpy_view
from penstock.ops.op import REGISTRY, Op, kernel
from tests.ops.common import assert_same_bits, normal

NAMES = """
accept_drafts add all_gather all_reduce altup_match altup_mix attention_decode attention_paged attention_prefill
attention_prepare attention_scores attention_softmax attention_values beside bf16_matmul chain_draft columns
conv1d_causal conv1d_commit conv1d_state_update delta_commit dequantize draft_rows embedding expert_down_sum
expert_gate_up expert_matmul expert_mlp fused_gate_up_geglu fused_gate_up_swiglu gated_delta_net gated_delta_step
gated_delta_verify gated_rms_norm gaussian_topk gdn_decay_beta geglu gelu_tanh head_norm_rope ids_after_first
kv_cache_append kv_pages_append matmul matmul_add mla_cache_append mla_expand mla_out_per_head mla_prefill mla_prepare
mla_q_prime mla_sdpa mla_sdpa_finalize mla_sdpa_tile_accumulate mla_split_q_kv moe_biased_forward moe_bucket_accumulate
moe_combine_residual moe_forward moe_group_route moe_norm_group_route moe_norm_route moe_normalize_weights moe_route
moe_route_forward moe_shared_forward moe_softmax_topk moe_wsum_dnorm_add moe_wsum_norm_add
moe_wsum_post_ff_norm2_endlayer mul norm_add norm_add_scalar norm_matmul part_ids position_scale post_attn_triple_norm
post_ff_norm2_endlayer proportional_inv_freq quantized_embedding quantized_matmul residual_add residual_norm
residual_norm_scalar rms_norm rms_norm_mul rms_norm_qk rms_norm_triple rope rope_inv_freq sample_tokens sigmoid_gate
softcap split_columns split_q_gate swiglu token_logprobs weighted_sum yarn_inv_freq
""".split()

FAMILIES = """
altup attention cache collective delta drafts elementwise embed linear mla moe norm rope sampling
""".split()


def made(body, infer, check=None, writes=(), alias=False, partial=False) -> Op:
    """An op that is not registered."""
    return Op(body, infer, check, writes, alias, partial, False)


def twice(x: "Array", n: "int" = 2) -> "Array":
    return x * np.float32(n)


@pytest.fixture
def double() -> Op:
    return made(twice, lambda x, n: (check.floating(x=x), x)[1], alias=True)


def test_registry_holds_exactly_the_documented_ops():
    assert sorted(REGISTRY) == NAMES
    assert {op.family for op in REGISTRY.values()} == set(FAMILIES)
    assert all(getattr(ops, name) is REGISTRY[name] for name in NAMES)


def test_registry_covers_each_source_kernel_once():
    """By the table of docs/kernels.md."""
    page = (Path(__file__).parents[2] / "docs/kernels.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (`.*`) \|$", page.partition("## Source kernels")[2], re.MULTILINE)
    assert set(dict(rows)) <= set(REGISTRY)
    sources = [source for _, cell in rows for source in cell.split(", ")]
    assert len(sources) == len(set(sources)) == 85


def test_registry_ops_have_a_docstring_and_annotated_arguments():
    known = {
        "Array",
        "QuantizedTensor",
        "ExpertBlobs",
        "Sequence[QuantizedTensor]",
        "int",
        "float",
        "str",
        "bool",
        "None",
    }
    for op in REGISTRY.values():
        assert op.doc, op.name
        assert set().union(*op.kinds) <= known, op.name
        assert set(op.writes) <= set(op.params)


def test_import_is_light():
    heavy = ("torch", "triton", "numba", "llvmlite", "typer")
    code = f"import sys, penstock; print([m for m in {heavy} if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


# -- arguments -------------------------------------------------------------------------------------------------------


def test_call_raises_pythons_message_under_the_ops_name():
    with pytest.raises(TypeError, match=r"^rms_norm\(\) missing 1 required positional argument: 'x'"):
        rms_norm()
    with pytest.raises(TypeError, match=r"^rms_norm\(\) got an unexpected keyword argument 'epsilon'"):
        rms_norm(np.ones(4, "f4"), epsilon=1)


@pytest.mark.parametrize(
    "value, shown",
    [([1.0], "a list"), (3, "3"), ("x", "'x'"), (None, "None"), ({}, "a dict"), (memoryview(b"ab"), "a memoryview")],
)
def test_call_refuses_what_is_not_an_array(value, shown):
    with pytest.raises(DTypeError, match=rf"^rms_norm: x is {shown}, expected an array"):
        rms_norm(value)


def test_call_refuses_a_scalar_of_the_wrong_type_also_after_an_equal_one_of_the_right_type(double):
    x = np.ones(3, "f4")
    assert double(x, 1)[0] == 1
    for wrong in (True, 1.0, "1", None):
        with pytest.raises(DTypeError, match=r"^twice: n is .*, expected an int"):
            double(x, wrong)


def test_call_takes_numpy_scalars_as_numbers(double):
    assert double(np.ones(3, "f4"), np.int64(5))[0] == 5
    assert rms_norm(np.ones(3, "f4"), None, np.float32(0.25)).dtype == np.float32


def test_call_refuses_strided_and_misaligned_arrays(double):
    with pytest.raises(ShapeError, match=r"^twice: x is not contiguous \(shape \(3, 2\)\)"):
        double(np.ones((3, 4), "f4")[:, ::2])
    with pytest.raises(ShapeError, match=r"^twice: x is not contiguous"):
        double(torch.ones(3, 4).t())
    with pytest.raises(ShapeError, match=r"^twice: x is not aligned"):
        double(np.zeros(17, np.uint8)[1:].view("f4"))


def test_call_refuses_foreign_byte_order(double):
    with pytest.raises(DTypeError, match=r"^twice: x has dtype >f4"):
        double(np.ones(3, ">f4"))


def test_call_refuses_mixed_places():
    x, w = np.ones((2, 4), "f4"), torch.ones(4)
    with pytest.raises(
        InvalidArgument, match=r"^rms_norm: weight is on the host \(torch\), expected the host \(NumPy\), where x is"
    ):
        rms_norm(x, w)


def test_call_reads_memory_maps(tmp_path, double):
    np.ones(6, "f4").tofile(tmp_path / "x")
    mapped = np.memmap(tmp_path / "x", "f4", mode="r")
    assert double(mapped).tolist() == [2.0] * 6


def test_plans_do_not_grow_without_bound(double):
    x = np.ones(1, "f4")
    for n in range(5000):
        double(x, n)
    assert len(double._plans) <= 4096


# -- out -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "out, error, message",
    [
        (np.zeros(3, "f2"), DTypeError, "out has dtype float16, expected float32"),
        (np.zeros(4, "f4"), ShapeError, r"out has shape \(4,\), expected \(3,\)"),
        (np.zeros(6, "f4")[::2], ShapeError, "out is not contiguous"),
        (torch.zeros(3), InvalidArgument, r"out is on the host \(torch\), expected the host \(NumPy\)"),
        ([1.0, 2.0], ShapeError, "out has 2 arrays, expected 1"),
        (5, DTypeError, "out is a int, expected an array"),
    ],
)
def test_out_is_checked_before_anything_is_written(double, out, error, message):
    with pytest.raises(error, match=rf"^twice: {message}"):
        double(np.ones(3, "f4"), out=out)
    assert not isinstance(out, np.ndarray) or not out.any()


def test_out_must_be_writable(double):
    out = np.zeros(3, "f4")
    out.flags.writeable = False
    with pytest.raises(InvalidArgument, match=r"^twice: out is read-only"):
        double(np.ones(3, "f4"), out=out)


def test_out_may_be_the_input_of_an_aliasing_op_but_never_overlap_in_part(double):
    buffer = np.arange(5, dtype="f4")
    with pytest.raises(InvalidArgument, match=r"^twice: out overlaps x in memory, expected the same start and shape"):
        double(buffer[:4], out=buffer[1:])
    assert buffer.tolist() == [0, 1, 2, 3, 4]
    x = buffer[:4]
    assert double(x, out=x) is x
    assert buffer.tolist() == [0, 2, 4, 6, 4]


def test_out_of_an_op_that_does_not_alias_may_not_overlap_at_all():
    plain = made(twice, lambda x, n: x)
    x = np.ones(3, "f4")
    with pytest.raises(InvalidArgument, match=r"^twice: out overlaps x in memory, expected no overlap"):
        plain(x, out=x)


def test_two_outputs_may_not_overlap():
    x, w, buffer = np.ones((1, 4), "f4"), np.ones(4, "f4"), np.zeros((1, 4), "f4")
    with pytest.raises(InvalidArgument, match=r"^residual_norm: out\[1\] overlaps out\[0\]"):
        residual_norm(x, x.copy(), w, write_sum=True, out=(buffer, buffer))


def test_out_entries_may_be_none():
    x, w, total = np.ones((1, 4), "f4"), np.ones(4, "f4"), np.zeros((1, 4), "f4")
    y, v = residual_norm(x, x.copy(), w, write_sum=True, out=(None, total))
    assert v is total
    assert v.tolist() == [[2] * 4]
    assert np.allclose(y, 1, atol=1e-6)


def test_a_buffer_for_an_output_nobody_asked_for_is_left_alone():
    x, w, total = np.ones((1, 4), "f4"), np.ones(4, "f4"), np.full((1, 4), 7, "f4")
    assert residual_norm(x, x.copy(), w, out=(np.empty((1, 4), "f4"), total)).shape == (1, 4)
    assert residual_norm(x, x.copy(), w, out=np.empty((1, 4), "f4")).shape == (1, 4)
    assert total.tolist() == [[7] * 4]


# -- state -----------------------------------------------------------------------------------------------------------


def push(state: "Array", x: "Array") -> None:
    state += x


@pytest.fixture
def pusher() -> Op:
    return made(push, lambda state, x: None, check=lambda state, x: check.in_range("x", x, 0, 9), writes=("state",))


def test_state_op_changes_its_argument_and_returns_nothing(pusher):
    state = np.ones(2, "f4")
    assert pusher(state, np.ones(2, "f4")) is None
    assert state.tolist() == [2, 2]


def test_state_must_be_writable_and_apart_from_the_inputs(pusher):
    state = np.ones(4, "f4")
    with pytest.raises(InvalidArgument, match=r"^push: state overlaps x"):
        pusher(state, state)
    state.flags.writeable = False
    with pytest.raises(InvalidArgument, match=r"^push: state is read-only"):
        pusher(state, np.ones(4, "f4"))


def test_value_check_runs_before_the_state_is_touched(pusher):
    state = np.ones(2, "f4")
    with pytest.raises(InvalidArgument, match=r"^push: x has 9, expected 0 to 8"):
        pusher(state, np.array([1, 9], "f4"))
    assert state.tolist() == [1, 1]


# -- torch -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_torch_tensors_share_memory_with_the_kernel(dtype):
    x = torch.ones(2, 4, dtype=dtype)
    assert numpy_view(x).ctypes.data == x.data_ptr()
    y = residual_add(x, x.clone(), out=x)
    assert y is x
    assert x.eq(2).all()
    assert residual_add(x, x.clone()).dtype is dtype


def test_torch_tensor_with_gradient_is_read_as_it_is():
    y = rms_norm(torch.ones(2, 4, requires_grad=True))
    assert isinstance(y, torch.Tensor)
    assert not y.requires_grad


# -- backends and kernels --------------------------------------------------------------------------------------------


def triple(x, n, *, out, variant):
    out[...] = x * 3 if variant is None else -x


def test_kernel_of_the_device_runs_and_the_definition_can_be_forced(double):
    kernel(double, device="cpu", variants=("negative",))(triple)
    x = np.ones(2, "f4")
    assert double(x).tolist() == [3, 3]
    with penstock.backend("reference"):
        assert double(x).tolist() == [2, 2]
    with penstock.backend("cpu", variant="negative"):
        assert double(x).tolist() == [-1, -1]
        with penstock.backend("auto"):
            assert double(x).tolist() == [3, 3]
    assert double(torch.ones(2)).tolist() == [3, 3]


def test_kernel_is_registered_once_per_device(double):
    kernel(double, device="cpu")(triple)
    with pytest.raises(InvalidArgument, match="two kernels"):
        kernel(double, device="cpu")(triple)
    with pytest.raises(InvalidArgument, match="device is 'tpu'"):
        kernel(double, device="tpu")


def test_forced_backend_is_strict(double):
    x = np.ones(2, "f4")
    with penstock.backend("cpu"), pytest.raises(KernelNotFound, match=r"^twice: no kernel .* 'cpu'"):
        double(x)
    with (
        penstock.backend("cuda"),
        pytest.raises(InvalidArgument, match=r"^twice: backend 'cuda' is forced, but the arrays"),
    ):
        double(x)
    with penstock.backend("cuda"), pytest.raises((KernelNotFound, BackendError)):
        double(torch.ones(2))
    kernel(double, device="cpu", variants=("negative",))(triple)
    with penstock.backend("cpu", variant="other"), pytest.raises(KernelNotFound, match=r"'other' .* one of: negative"):
        double(x)


@pytest.mark.parametrize("arguments", [("tpu",), ("reference", "plain"), ("auto", "plain")])
def test_backend_refuses_unknown_names(arguments):
    with pytest.raises(InvalidArgument, match="^backend: "), penstock.backend(*arguments):
        pass


def test_backend_is_undone_after_an_error_and_does_not_leak_to_other_threads(double):
    kernel(double, device="cpu", variants=("negative",))(triple)
    x, seen = np.ones(1, "f4"), []
    with penstock.backend("reference"):
        thread = threading.Thread(target=lambda: seen.append(double(x)[0]))
        thread.start()
        thread.join()
    assert seen == [3]
    with pytest.raises(ZeroDivisionError), penstock.backend("reference"):
        raise ZeroDivisionError
    assert double(x)[0] == 3


def test_partial_op_starts_from_zero_and_keeps_what_it_does_not_write():
    def first(x: "Array", out=None) -> None:
        out[0] = x[0]

    partial = made(first, lambda x: x, partial=True)
    x, given = np.full(3, 5, "f4"), np.full(3, 9, "f4")
    assert partial(x).tolist() == [5, 0, 0]
    assert partial(x, out=given) is given
    assert given.tolist() == [5, 9, 9]
    assert "out" in str(partial.signature)


def test_errors_share_one_root():
    assert issubclass(InvalidArgument, (PenstockError, ValueError))
    assert issubclass(ShapeError, InvalidArgument)
    assert issubclass(DTypeError, (InvalidArgument, TypeError))
    assert issubclass(KernelNotFound, (PenstockError, LookupError))


# -- symbols ---------------------------------------------------------------------------------------------------------


class Recorded(Symbol):
    """The least a tracer needs: it lists its nodes and answers with symbols of the inferred specs."""

    def __init__(self, spec, nodes):
        self.spec, self.nodes = spec, nodes

    def record(self, op, arguments, specs, out):
        self.nodes.append((op.name, arguments, out))
        made = tuple(Recorded(spec, self.nodes) for spec in specs if spec is not None)
        return made[0] if len(made) == 1 else made or None


def test_symbols_record_nodes_with_inferred_shapes(rng):
    nodes = []
    x = Recorded(Spec((5, 64), "bfloat16"), nodes)
    w = penstock.quantize(normal(rng, 96, 64))
    h = ops.quantized_matmul(ops.rms_norm(x, normal(rng, 64)), w, dtype="float32")
    ids, weights = ops.moe_route(h, None, 8)
    assert [name for name, _, _ in nodes] == ["rms_norm", "quantized_matmul", "moe_route"]
    assert h.spec == Spec((5, 96), "float32")
    assert (ids.spec, weights.spec) == (Spec((5, 8), "int32"), Spec((5, 8), "float32"))
    assert nodes[1][1]["w"] is w


def test_symbols_are_checked_like_arrays():
    x = Recorded(Spec((5, 64), "int8"), [])
    with pytest.raises(DTypeError, match=r"^rms_norm: x has dtype int8"):
        rms_norm(x)
    state = Recorded(Spec((3, 8), "float32"), nodes := [])
    ops.conv1d_state_update(state, Recorded(Spec((5, 8), "float32"), nodes))
    assert nodes[0][0] == "conv1d_state_update"
    with pytest.raises(InvalidArgument, match=r"^conv1d_state_update: state overlaps x"):
        ops.conv1d_state_update(state, state)


def test_bfloat16_results_are_ml_dtypes_arrays(rng):
    x = normal(rng, 3, 8, dtype="bfloat16")
    y = rms_norm(x)
    assert y.dtype == bfloat16
    assert_same_bits(
        "y", y, rms_norm(torch.from_numpy(x.view("i2")).view(torch.bfloat16)).view(torch.int16).numpy().view(bfloat16)
    )
