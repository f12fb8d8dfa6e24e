"""The demo model, trained and in 4 bits: against mlx-lm in float32, exact against int8, and what it writes."""

import functools
from pathlib import Path

import numpy as np
import pytest

import penstock
from penstock.api import LLM
from tests.models.common import error

DEMO = Path(penstock.__file__).parent / "demo" / "model"

# Fables of Aesop, translated by George Fyler Townsend (1867).
FABLES = """\
A lion, fatigued by the heat of a summer's day, fell fast asleep in his den. A mouse ran over his mane and ears and \
woke him from his slumbers. He rose up and shook himself in great wrath, and searched every corner of his den to \
find the mouse. A fox seeing him said: "A fine Lion you are, to be frightened of a Mouse." "'Tis not the Mouse I \
fear," said the Lion; "I resent his familiarity and ill-breeding."

A crow perishing with thirst saw a pitcher, and hoping to find water, flew to it with delight. When he reached it, \
he discovered to his grief that it contained so little water that he could not possibly get at it. He tried \
everything he could think of to reach the water, but all his efforts were in vain. At last he collected as many \
stones as he could carry and dropped them one by one with his beak into the pitcher, until he brought the water \
within his reach and thus saved his life. Necessity is the mother of invention.

A wolf, meeting with a lamb astray from the fold, resolved not to lay violent hands on him, but to find some plea \
to justify to the lamb the wolf's right to eat him. He thus addressed him: "Sirrah, last year you grossly insulted \
me." "Indeed," bleated the lamb in a mournful tone of voice, "I was not then born." Then said the wolf, "You feed \
in my pasture." "No, good sir," replied the lamb, "I have not yet tasted grass." Again said the wolf, "You drink of \
my well." "No," exclaimed the lamb, "I never yet drank water, for as yet my mother's milk is both food and drink to \
me." Upon which the wolf seized him and ate him up, saying, "Well! I won't remain supperless, even though you \
refute every one of my imputations." The tyrant will always find a pretext for his tyranny.

A hare one day ridiculed the short feet and slow pace of the tortoise, who replied, laughing: "Though you be swift \
as the wind, I will beat you in a race." The hare, believing her assertion to be simply impossible, assented to the \
proposal; and they agreed that the fox should choose the course and fix the goal. On the day appointed for the race \
the two started together. The tortoise never for a moment stopped, but went on with a slow but steady pace straight \
to the end of the course. The hare, lying down by the wayside, fell fast asleep. At last waking up, and moving as \
fast as he could, he saw the tortoise had reached the goal, and was comfortably dozing after her fatigue. Slow but \
steady wins the race.
"""


@functools.cache
def demo(activations: str = "float32", device: str = "cpu") -> LLM:
    return penstock.load(device=device, activations=activations)


@functools.cache
def logits(activations: str) -> np.ndarray:
    return demo(activations).logits(tokens())


def tokens() -> list[int]:
    return demo("float32", "reference").tokenizer.encode(FABLES)


def perplexity(logits: np.ndarray, ids: list[int]) -> float:
    rows = logits[:-1].astype(np.float64)
    rows -= rows.max(axis=1, keepdims=True)
    chosen = rows[np.arange(len(rows)), ids[1:]] - np.log(np.exp(rows).sum(axis=1))
    return float(np.exp(-chosen.mean()))


def test_logits_are_those_of_mlx() -> None:
    """mlx-lm loads what our own quantizer made."""
    mx = pytest.importorskip("mlx.core")
    utils = pytest.importorskip("mlx_lm.utils")
    model, _ = utils.load_model(DEMO)
    model.set_dtype(mx.float32)
    ids = tokens()[:40]
    want = np.array(model(mx.array([ids]))[0])
    assert error(logits("float32")[:40], want) <= 5e-6
    assert error(demo(device="reference").logits(ids), want) <= 5e-6


def test_it_reads_english() -> None:
    assert len(tokens()) > 600  # three pieces of the prefill grid
    assert perplexity(logits("float32"), tokens()) == pytest.approx(45.12, rel=1e-3)
    scrambled = np.random.default_rng(0).permutation(tokens()).tolist()
    assert perplexity(demo("float32").logits(scrambled), scrambled) > 1000


def test_int8_activations_cost_little() -> None:
    exact, rounded = logits("float32"), logits("int8")
    assert perplexity(rounded, tokens()) == pytest.approx(perplexity(exact, tokens()), rel=0.01)
    cosines = np.sum(exact * rounded, axis=1) / np.linalg.norm(exact, axis=1) / np.linalg.norm(rounded, axis=1)
    assert np.median(cosines) >= 0.999 and np.mean(cosines >= 0.99) >= 0.95
    assert np.mean(exact.argmax(axis=1) == rounded.argmax(axis=1)) >= 0.92


def test_generate_writes_what_it_always_wrote() -> None:
    """Greedy and exact; the closest two tokens on the way are 0.006 apart, thousands of times the rounding."""
    answer = demo().generate("The fox said to the crow", max_tokens=31)
    assert (
        answer.text
        == ': "I will not be able to eat you as well, but I will not do it." The fox said: "I will not do it,'
    )
    assert (answer.finish_reason, len(answer.tokens)) == ("length", 31)


def test_generate_ends_an_answer_by_itself() -> None:
    messages = [{"role": "user", "content": "Who was the fox?"}]
    answer = demo().chat(messages, max_tokens=400)
    assert answer.finish_reason == "stop" and answer.tokens[-1] in demo().tokenizer.eos_ids
    assert "<|im_end|>" not in answer.text and answer.text


def test_the_package_names_whose_texts_it_was_trained_on() -> None:
    about = (DEMO / "README.md").read_text()
    assert "Pratham Books" in about and "African Storybook" in about and "CC BY 4.0" in about
