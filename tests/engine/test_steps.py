"""Ragged steps: any mix of prompts and answers gives each sequence what it gets alone, bit by bit."""

import numpy as np
import pytest

from penstock.api import LLM, load_random
from penstock.engine.engine import Engine
from penstock.engine.steps import MOST_TOKENS, Run, step_arrays, table_names
from penstock.graph import SizedProgram
from tests.graph.test_models import CONFIGS
from tests.models.common import some_tokens

FAMILIES = tuple(CONFIGS)


def ids(tokens: list[int]) -> np.ndarray:
    return np.array(tokens, np.int32)


def alone(engine: Engine, tokens: list[int], prompt: int) -> np.ndarray:
    """Logits after the prompt and after each token behind it, which come one by one."""
    sequence = engine.open()
    rows = [engine.prefill(sequence, tokens[:prompt])]
    rows += [engine.decode([sequence], [token])[0] for token in tokens[prompt:]]
    engine.close(sequence)
    return np.array(rows)


@pytest.fixture(params=["cpu", "reference"])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


def model(name: str, device: str) -> LLM:
    return load_random(CONFIGS[name], device=device, activations="float32", max_context=1024)


@pytest.mark.parametrize("name", FAMILIES)
def test_prompts_and_answers_in_one_step_have_the_bits_that_each_has_alone(name, device):
    engine = model(name, device).engine
    prompts, answers = (20, 3, 11, 1), (4, 5, 4, 6)
    texts = [some_tokens(40)[start:][: p + a] for start, p, a in zip((0, 5, 9, 16), prompts, answers, strict=True)]
    want = [alone(engine, text, prompt) for text, prompt in zip(texts, prompts, strict=True)]
    sequences = [engine.open() for _ in texts]
    got: list[list[np.ndarray]] = [[] for _ in texts]
    for number in range(max(answers) + len(texts)):
        # each joins at another step with its whole prompt, while those before it go on token by token
        runs, whose = [], []
        for n, sequence in enumerate(sequences):
            if number < n or sequence.length == len(texts[n]):
                continue
            chunk = texts[n][: prompts[n]] if sequence.length == 0 else [texts[n][sequence.length]]
            runs.append(Run(sequence, ids(chunk), prompt=sequence.length == 0))
            whose.append(n)
        if not runs:
            break
        logits = engine.step(runs)
        assert logits is not None
        for n, row in zip(whose, logits, strict=True):
            got[n].append(row)
    for rows, expected in zip(got, want, strict=True):
        np.testing.assert_array_equal(np.array(rows), expected)


@pytest.mark.parametrize("name", FAMILIES)
def test_several_tokens_of_several_answers_are_those_one_by_one(name, device):
    """As drafts are verified, where the state of every token is wanted and none is recurrent."""
    if name.startswith("qwen3_"):
        pytest.skip("a run of several tokens moves the recurrent state as a prompt's does")
    engine = model(name, device).engine
    texts = [some_tokens(30), some_tokens(30)[3:], some_tokens(30)[7:]]
    sequences = [engine.open() for _ in texts]
    for sequence, text in zip(sequences, texts, strict=True):
        engine.prefill(sequence, text[:10])
    runs = [Run(sequence, ids(text[10:14]), "all") for sequence, text in zip(sequences, texts, strict=True)]
    logits = engine.step(runs)
    assert logits is not None
    for n, text in enumerate(texts):
        np.testing.assert_array_equal(logits[4 * n : 4 * n + 4], alone(engine, text[:14], 10)[1:])


def test_a_step_without_logits_moves_its_sequences_on(device):
    engine = model("qwen3_5", device).engine
    tokens = some_tokens(30)
    first, second = engine.open(), engine.open()
    assert engine.step([Run(first, ids(tokens[:20]), "none", True), Run(second, ids(tokens[:7]), "none", True)]) is None
    want = engine.open(), engine.open()
    for sequence, count in zip(want, (20, 7), strict=True):
        engine.prefill(sequence, tokens[:count])
    got = engine.decode([first, second], tokens[20:22])
    np.testing.assert_array_equal(got, engine.decode(want, tokens[20:22]))


def test_nothing_is_traced_after_the_first_steps(monkeypatch):
    """200 steps of random sizes: each kind is traced once, all others are bound to it."""
    made = []
    create = SizedProgram.__init__

    def counted(self, *args, **options):
        made.append(self)
        create(self, *args, **options)

    monkeypatch.setattr(SizedProgram, "__init__", counted)
    engine = load_random(CONFIGS["qwen3_5"], device="cpu", max_context=1024).engine
    rng = np.random.default_rng(0)
    for _ in range(200):
        sequences = [engine.open() for _ in range(rng.integers(1, 9))]
        room = MOST_TOKENS // len(sequences)
        runs = [
            Run(
                sequence,
                ids(some_tokens(int(rng.integers(1, min(60, room))))),
                rng.choice(["none", "last", "all"]),
                True,
            )
            for sequence in sequences
        ]
        engine.step(runs)
        for sequence in sequences:
            engine.close(sequence)
    assert len(made) <= 6  # one token, a few and more, with logits and without


def test_arrays_of_a_step_say_whose_each_row_is():
    engine = load_random(CONFIGS["llama-tied"], device="cpu", max_context=1024).engine
    sequences = [engine.open() for _ in range(3)]
    engine.prefill(sequences[1], some_tokens(300))
    for sequence, count in zip(sequences, (2, 1, 3), strict=True):
        engine.caches.reserve(sequence, count)
    runs = [
        Run(sequences[0], ids([5, 6])),
        Run(sequences[1], ids([7]), "none"),
        Run(sequences[2], ids([8, 9, 4]), "all"),
    ]
    arrays = step_arrays(runs, table_names(engine.caches.pools))
    assert arrays["tokens"].tolist() == [5, 6, 7, 8, 9, 4]
    assert arrays["positions"].tolist() == [0, 1, 300, 0, 1, 2]
    assert arrays["sequence"].tolist() == [0, 0, 1, 2, 2, 2]
    assert arrays["starts"].tolist() == [0, 2, 3, 6] and arrays["lengths"].tolist() == [2, 301, 3]
    assert arrays["wanted"].tolist() == [1, 3, 4, 5]
    assert arrays["table"].shape == (3, 4) and len(set(arrays["table"][:, 0].tolist())) == 3
