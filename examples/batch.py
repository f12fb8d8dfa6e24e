"""Many prompts at once: decoded together, with options of their own, and reported as each one ends.

python examples/batch.py [MODEL]
"""

import sys

import penstock

PROMPTS = ["Once upon a time", "The king said", "A fox and a crow", "Deep in the forest"]


def main() -> None:
    llm = penstock.load(sys.argv[1] if len(sys.argv) > 1 else None)

    # one call, answers in the order of the prompts; an option that is a list has one value per prompt
    answers = llm.generate(PROMPTS, max_tokens=[8, 16, 24, 32], temperature=0.8, seed=[1, 2, 3, 4])
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        print(f"{prompt} …{answer.text!r} ({answer.usage.completion_tokens} tokens, {answer.finish_reason})")

    # the same as they come: the number of a prompt, and a piece of its answer
    texts = [""] * len(PROMPTS)
    for number, chunk in llm.stream_batch(PROMPTS, max_tokens=[8, 16, 24, 32], temperature=0.8, seed=[1, 2, 3, 4]):
        texts[number] += chunk.text
        if chunk.finish_reason is not None:
            print(f"prompt {number} ended: {chunk.finish_reason}")
    assert texts == [answer.text for answer in answers]  # a seed gives the same text


if __name__ == "__main__":
    main()
