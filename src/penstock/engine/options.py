"""What `load` and the verbs of the command line may leave open: device, dtypes, rounding, threads; memory beside."""

from __future__ import annotations

from typing import NamedTuple

from penstock.backends.cuda.runtime import features as cuda
from penstock.errors import InvalidArgument
from penstock.ops.device import device_type
from penstock.settings import Settings

DEVICES = ("auto", "cpu", "cuda", "reference")
DTYPES = ("auto", "float32", "bfloat16")
STATE_DTYPES = ("auto", "float32", "bfloat16")
ACTIVATIONS = ("auto", "int8", "float32")
WORKING_BYTES = 256 << 20  # for activations of a prefill's chunk, the tokenizer and the interpreter itself


class Options(NamedTuple):
    """Names of a device, of the dtype of activations, and how quantized products round them."""

    device: str
    dtype: str
    activations: str


def resolve_options(
    device: str = "auto", dtype: str = "auto", activations: str = "auto", threads: int | None = None
) -> Options:
    """What "auto" stands for here, by the settings and the device; sets the threads of its kernels.

    Raises InvalidArgument for an unknown name or number.
    """
    for name, value, allowed in (
        ("device", device, DEVICES),
        ("dtype", dtype, DTYPES),
        ("activations", activations, ACTIVATIONS),
    ):
        if value not in allowed:
            raise InvalidArgument(f"load: {name} is {value!r}, expected one of {', '.join(allowed)}")
    if threads is not None and (isinstance(threads, bool) or not isinstance(threads, int)):
        raise InvalidArgument(f"load: threads is {threads!r}, expected an integer")
    device = resolve_device(device)
    kind = device_type(device)
    if (count := threads if threads is not None else Settings.from_env().threads) is not None:
        kind.set_threads(count)
    return Options(
        device,
        kind.default_dtype if dtype == "auto" else dtype,
        kind.default_activations if activations == "auto" else activations,
    )


def resolve_device(device: str) -> str:
    """What "auto" stands for here: the setting, else a GPU if one can be used, else the CPU."""
    if device != "auto":
        return device
    chosen = Settings.from_env().device
    return chosen if chosen != "auto" else "cpu" if cuda.unusable() else "cuda"


def resolve_state_dtype(state_dtype: str, device: str) -> str:
    """The dtype of recurrent states on a device: what "auto" stands for is a setting, or float32.

    Raises InvalidArgument for an unknown name, and for one that the device's kernels do not take.
    """
    if state_dtype not in STATE_DTYPES:
        raise InvalidArgument(f"load: state_dtype is {state_dtype!r}, expected one of {', '.join(STATE_DTYPES)}")
    chosen = state_dtype if state_dtype != "auto" else Settings.from_env().state_dtype
    chosen = "float32" if chosen == "auto" else chosen
    if chosen not in (taken := device_type(device).state_dtypes):
        raise InvalidArgument(
            f"load: state_dtype is {chosen!r}, expected {' or '.join(taken)}: device {device!r} has no others"
        )
    return chosen
