"""Predictions by bytes are bounds; what is expected of a family was measured on such a device, or is left open."""

import json

import pytest

from penstock.analysis.measured import SHARES, family_of, measured_share
from penstock.cli.main import run
from penstock.models import FAMILIES


def test_shares_are_of_families_and_below_what_bytes_allow():
    assert {family_of(config) for _, config in SHARES} <= set(FAMILIES.values())
    assert all(0 < found.share < 1 and found.source.endswith((".json", ".md")) for found in SHARES.values())


@pytest.mark.parametrize("device, bandwidth, known", [("cuda", 4260, True), ("cuda", 900, False), ("cpu", 20, True)])
def test_measured_share_is_of_a_device_like_the_one_that_was_measured(device, bandwidth, known):
    assert (measured_share(device, "qwen3_5", bandwidth) is not None) == known
    assert measured_share(device, "nosuch", bandwidth) is None


def test_plan_inspect_and_trace_say_at_most_and_expected(capsys):
    where = ["qwen3.6-35b-a3b", "--device", "cuda"]
    plan = ["plan", *where, "--device-memory", "141GB", "--memory-bandwidth", "4260"]
    commands = plan, ["inspect", *where, "--bandwidth", "4260"], ["kernels", "--trace", *where, "--bandwidth", "4260"]
    found = []
    for command in commands:
        assert run(command) == run([*command, "--json"]) == 0
        text, _, data = capsys.readouterr().out.partition("\n{\n")
        assert "at most" in text and "expected" in text and "H200" in text
        found.append(json.loads("{" + data))
    warm = found[0]["predicted"]["warm"]
    assert warm["expected_tokens_per_s"] == pytest.approx(warm["tokens_per_s"] * found[0]["expected_share"])
    assert found[1]["expected_tokens_per_s"] == pytest.approx(0.27 * found[1]["limit_tokens_per_s"])
    before, after = found[2]["before"], found[2]["after"]
    for side in (before, after):
        assert side["with_launches_us"] == pytest.approx(side["predicted_us"] + side["count"] * found[2]["launch_us"])
    assert before["with_launches_us"] > 2 * after["with_launches_us"]
