"""`expert_heat`: how often an answer chose each expert, over HTTP."""

import numpy as np

from penstock.analysis.expert_routes import record
from tests.server.common import PROMPT, error_of


def want(llm, count, messages=PROMPT):
    """Chosen experts of a greedy answer, layers × experts, by the recorder of `penstock routes`."""
    routes = record(llm, llm.chat_tokens(messages), max_tokens=count)
    ids = routes.ids[routes.decode].transpose(1, 0, 2)
    return [np.bincount(layer[layer >= 0], minlength=routes.experts).tolist() for layer in ids]


def test_counts_come_with_the_answer_where_they_are_asked_for(quiet, llm):
    counts = want(llm, 8)
    meta = quiet.client.get("/v1/models").json()["data"][0]["meta"]
    assert len(meta["expert_layers"]) == len(counts) and meta["expert_layers"] == sorted(set(meta["expert_layers"]))
    whole = quiet.chat(expert_heat=True).json()
    assert whole["expert_heat"] == {"counts": counts}
    twice = quiet.chat(expert_heat=True, n=2).json()
    assert twice["expert_heat"]["counts"] == (2 * np.array(counts)).tolist()
    assert "expert_heat" not in quiet.chat().json() and "expert_heat" not in quiet.chat(expert_heat=False).json()
    text = quiet.client.post("/v1/completions", json={"prompt": "Once", "max_tokens": 3, "expert_heat": True}).json()
    assert np.shape(text["expert_heat"]["counts"]) == np.shape(counts)


def test_the_last_choice_of_a_stream_brings_them(quiet, llm):
    for options in ({}, {"stream_options": {"include_usage": True}}):
        events = [event for event in quiet.events(expert_heat=True, **options) if event != "[DONE]"]
        [found] = [event for event in events if "expert_heat" in event]
        assert found["choices"][0]["finish_reason"] == "length" and "timings" in found
        assert found["expert_heat"]["counts"] == want(llm, 8)


def test_other_values_and_endpoints_refuse_it(quiet):
    assert error_of(quiet.chat(expert_heat=1))["param"] == "expert_heat"
    response = quiet.client.post("/v1/responses", json={"input": "x", "expert_heat": True})
    assert response.status_code == 400 and error_of(response)["param"] == "expert_heat"
