"""Experts of an answer, counted while it is written."""

import numpy as np
import pytest

import penstock
from penstock.analysis.expert_routes import record
from penstock.engine.heat import ExpertHeat
from penstock.engine.scheduler import Scheduler
from penstock.errors import InvalidArgument
from tests.models.common import dense_config, moe_config, some_tokens, write_model

CONFIG = moe_config(mlp_only_layers=[1], intermediate_size=160)  # of four layers the second has no experts


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("mixed"), CONFIG)


@pytest.fixture(scope="module")
def llm(folder):
    return penstock.load(folder, device="cpu", activations="float32", speculate="off")


def recorded(llm, prompt, **options):
    """The counts of the answer's own tokens as `penstock routes` finds them."""
    routes = record(llm, prompt, **options)
    ids = routes.ids[routes.decode].transpose(1, 0, 2)
    return np.stack([np.bincount(layer[layer >= 0], minlength=routes.experts) for layer in ids])


def test_counts_are_those_of_the_recorded_routes(llm):
    options = {"max_tokens": 17, "temperature": 1.0, "seed": 3}
    want = recorded(llm, some_tokens(300), **options)
    scheduler = Scheduler(llm)
    handle = scheduler.submit(scheduler.request(some_tokens(300), expert_heat=True, **options))
    text = handle.result()
    assert want.shape == (3, 7) and want.sum() == 3 * 16 * llm.config.top_k
    np.testing.assert_array_equal(handle.expert_counts, want)
    plain = scheduler.submit(scheduler.request(some_tokens(300), **options))
    assert plain.result().tokens == text.tokens and plain.expert_counts is None
    scheduler.close()


def test_generate_tells_them_too(llm):
    prompt = some_tokens(20)
    found = llm.generate(prompt, 5, expert_heat=True)
    np.testing.assert_array_equal(found.expert_counts, recorded(llm, prompt, max_tokens=5))
    assert llm.generate(prompt, 5).expert_counts is None
    with pytest.raises(InvalidArgument, match="expert_heat is 1, expected True or False"):
        llm.generate(prompt, 5, expert_heat=1)


def test_streamed_experts_are_counted_alike(folder, llm):
    want = recorded(llm, some_tokens(30), max_tokens=12)
    few = penstock.load(folder, device="cpu", activations="float32", speculate="off", expert_cache="50%")
    assert few.engine.experts is not None
    scheduler = Scheduler(few)
    handle = scheduler.submit(scheduler.request(some_tokens(30), max_tokens=12, expert_heat=True))
    handle.result()
    np.testing.assert_array_equal(handle.expert_counts, want)
    scheduler.close()


def test_requests_of_one_step_are_counted_apart(llm):
    prompts = [some_tokens(5), some_tokens(41)[5:], some_tokens(70)[41:]]
    wants = [recorded(llm, prompt, max_tokens=9 + n) for n, prompt in enumerate(prompts)]
    scheduler = Scheduler(llm)
    asked = [scheduler.request(p, max_tokens=9 + n, expert_heat=n != 1) for n, p in enumerate(prompts)]
    handles = [scheduler.submit(one) for one in asked]
    for handle in handles:
        handle.result()
    for n in (0, 2):
        np.testing.assert_array_equal(handles[n].expert_counts, wants[n])
    assert handles[1].expert_counts is None
    scheduler.close()


def test_drafts_that_are_not_taken_do_not_count(folder):
    """With n-gram drafts, all of which are verified and few of which are right."""
    drafting = penstock.load(folder, device="cpu", activations="float32", speculate="ngram")
    prompt = some_tokens(12) * 4
    want = recorded(drafting, prompt, max_tokens=40)
    scheduler = Scheduler(drafting)
    handle = scheduler.submit(scheduler.request(prompt, max_tokens=40, expert_heat=True, speculate="ngram"))
    handle.result()
    assert handle.timings.draft_n > handle.timings.draft_n_accepted
    np.testing.assert_array_equal(handle.expert_counts, want)
    scheduler.close()


@pytest.mark.parametrize("config, device", [(dense_config(), "cpu"), (CONFIG, "reference")])
def test_nothing_is_told_without_experts_or_programs(tmp_path, config, device):
    llm = penstock.load(write_model(tmp_path, config), device=device, activations="float32")
    scheduler = Scheduler(llm)
    handle = scheduler.submit(scheduler.request(some_tokens(5), max_tokens=3, expert_heat=True))
    handle.result()
    assert handle.expert_counts is None
    scheduler.close()


def test_heat_adds_by_layer_and_forgets_what_is_not_accepted():
    heat = ExpertHeat()
    ids = np.array([[[0, 2], [2, -1]], [[1, 1], [0, 2]]], np.int32)
    heat.add(ids, 3)
    np.testing.assert_array_equal(heat.counts, [[1, 0, 2], [1, 2, 1]])
    heat.add(ids, 3, keep=True)
    np.testing.assert_array_equal(heat.counts, [[1, 0, 2], [1, 2, 1]])
    heat.accept(1)
    np.testing.assert_array_equal(heat.counts, [[2, 0, 3], [1, 4, 1]])
    heat.accept(1)
    np.testing.assert_array_equal(heat.counts, [[2, 0, 3], [1, 4, 1]])
