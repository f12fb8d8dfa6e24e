"""Every rule of fusion fires in the program of some family."""

import functools
from typing import Any

import numpy as np
import pytest

from penstock import models
from penstock.dtypes import numpy_dtype
from penstock.engine.cache import Caches
from penstock.engine.programs import Programs
from penstock.engine.steps import table_width
from penstock.graph import Graph
from penstock.graph.fuse import RULES
from penstock.graph.rewrite import Rule, rewritten
from penstock.models.random import Shapes
from penstock.models.step import empty
from penstock.ops.device import device_for, device_type
from tests.graph.common import names
from tests.graph.test_models import CONFIGS

BOTH = {"gemma4-wide and inputs": CONFIGS["gemma4-wide"] | {"hidden_size_per_layer_input": 32}}

# rule: config, devices, kind of step, tokens
FIRES: dict[str, tuple[str, tuple[str, ...], str, int]] = {
    "norm_add": ("gemma4-dense", ("cpu", "cuda"), "decode", 2),
    "rms_norm_triple": ("gemma4-moe", ("cpu", "cuda"), "decode", 1),
    "post_attn_triple_norm": ("gemma4-moe", ("cpu", "cuda"), "prefill", 64),
    "end_of_layer_scaled": ("gemma4-moe", ("cpu", "cuda"), "decode", 1),
    "end_of_layer": ("gemma4-wide and inputs", ("cpu", "cuda"), "decode", 1),
    "norm_add_scalar": ("gemma4-inputs", ("cpu", "cuda"), "prefill", 2),
    "head_norm_rope": ("llama-qwen3", ("cpu", "cuda"), "decode", 1),
    "moe_route": ("qwen3_5", ("cpu", "cuda"), "decode", 2),
    "fused_gate_up": ("llama-tied", ("cpu", "cuda"), "prefill", 2),
    "joined_products": ("qwen3_5", ("cpu", "cuda"), "decode", 1),
    "residual_norm": ("llama-tied", ("cpu", "cuda"), "prefill", 65),
    "moe_shared_forward": ("deepseek_v3-v3", ("cuda",), "decode", 1),
    "dense_norm": ("gemma4-moe", ("cuda",), "decode", 1),
    "gated_delta_step": ("qwen3_next", ("cpu", "cuda"), "decode", 2),
    "convolution_heads": ("qwen3_next", ("cuda",), "prefill", 65),
    "attention_prepare": ("llama-window", ("cuda",), "prefill", 64),
    "mla_prepare": ("deepseek_v3-v3", ("cuda",), "decode", 1),
    "attention_gate": ("qwen3_5", ("cuda",), "decode", 1),
    "matmul_add": ("llama-tied", ("cuda",), "decode", 8),
    "experts_add": ("gpt_oss", ("cuda",), "decode", 2),
    "moe_norm_route": ("gpt_oss", ("cuda",), "decode", 1),
    "moe_route_forward": ("qwen3_5", ("cuda",), "decode", 4),
    "norm_matmul": ("llama-tied", ("cuda",), "decode", 8),
}


@functools.cache
def step(name: str, device: str, kind: str, tokens: int) -> Graph:
    """A step of a family before fusion, as the device's programs are traced: one token of each of several sequences, or
    several of one. A device that captures has rows of no sequence in it, and the head in a program of its own.
    """
    raw: dict[str, Any] = (CONFIGS | BOTH)[name]
    family = models.family_of(raw)
    config = family.read_config(raw)
    caches = Caches(family.caches(config), "float32", device_for("cpu"))
    caches.arrays = [
        empty(layout, 4, tokens, "float32", lambda s, d: np.empty(s, numpy_dtype(d))) for layout in caches.layouts
    ]
    programs = Programs(family, config, family.read_weights(Shapes(raw), config), caches, "float32")
    decode, padded = kind == "decode", device_type(device).captures
    B = tokens if decode else 1
    return programs.graph(tokens, B, table_width(1), 0 if padded else B, decode=decode, padded=padded)


def name_of(rule: Rule) -> str:
    return rule.offers.__name__


def test_every_rule_is_here_with_its_devices():
    devices: dict[str, set[str]] = {}
    for rule in RULES:
        devices.setdefault(name_of(rule), set()).update(rule.devices)
    assert {name: set(found[1]) for name, found in FIRES.items()} == devices


@pytest.mark.parametrize("rule", FIRES)
def test_a_rule_fires_in_a_family(rule: str):
    config, devices, kind, tokens = FIRES[rule]
    others = [each for each in RULES if name_of(each) != rule]
    for device in devices:
        graph = step(config, device, kind, tokens)
        assert names(rewritten(graph, device, RULES)) != names(rewritten(graph, device, others)), device
