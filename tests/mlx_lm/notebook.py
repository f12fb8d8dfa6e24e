"""Cells of notebooks written for mlx-lm: what its README and its examples call, in our words. `package` is the name
behind `from`, the one thing that changes; each cell returns what is to be the same, whichever package it ran with.
"""

import contextlib
import copy
import importlib
import io
import json
from pathlib import Path
from typing import Any

import numpy as np

MODEL = str(Path(importlib.import_module("penstock").__file__ or "").parent / "demo" / "model")
TOOLS = """{% if tools %}<|im_start|>system
Tools:{% for tool in tools %} {{ tool | tojson }}{% endfor %}<|im_end|>
{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def loaded(package: str, path: str = MODEL) -> tuple[Any, Any]:
    """`load`; mlx computes in the dtype of the files unless it is told to do it in float32."""
    load = importlib.import_module(package).load
    model, tokenizer = load(path)
    if package == "mlx_lm":
        model.set_dtype(importlib.import_module("mlx.core").float32)
    return model, tokenizer


def quick_start(package: str, model: Any, tokenizer: Any) -> dict[str, Any]:
    """A message through the chat template, printed as it comes."""
    generate = importlib.import_module(package).generate
    messages = [{"role": "user", "content": "Write a story about a fox"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        text = generate(model, tokenizer, prompt=prompt, verbose=True, max_tokens=10)
    lines = printed.getvalue().splitlines()
    rules = [n for n, line in enumerate(lines) if line == "=" * 10]
    kinds = [line.partition(":")[0] for line in lines[rules[-1] + 1 :]]
    plain = generate(model, tokenizer, "Once upon a time", max_tokens=6)
    return {
        "prompt": prompt,
        "text": text,
        "shown": "\n".join(lines[1 : rules[-1]]),
        "numbers": kinds,
        "plain": plain,
        "template": tokenizer.apply_chat_template(messages, tokenize=False),
        "prefilled": tokenizer.apply_chat_template(
            [*messages, {"role": "assistant", "content": "The fox "}], tokenize=False, continue_final_message=True
        ),
    }


def streaming(package: str, model: Any, tokenizer: Any) -> dict[str, Any]:
    """Responses one by one, with their numbers; how far the prompt is."""
    stream_generate = importlib.import_module(package).stream_generate
    prompt, done = tokenizer.encode("The fox said to the crow"), []
    responses = list(
        stream_generate(
            model, tokenizer, prompt, max_tokens=6, prompt_progress_callback=lambda *counts: done.append(counts)
        )
    )
    last = responses[-1]
    return {
        "texts": [response.text for response in responses],
        "tokens": [response.token for response in responses],
        "chosen": [round(float(response.logprobs[response.token]), 3) for response in responses],
        "shape": tuple(last.logprobs.shape),
        "counts": [(response.prompt_tokens, response.generation_tokens) for response in responses],
        "finish": [response.finish_reason for response in responses],
        "draft": any(response.from_draft for response in responses),
        "progress": (done[0], done[-1]),
        "positive": last.prompt_tps > 0 and last.generation_tps > 0 and last.peak_memory > 0,
        "fields": list(last.__dataclass_fields__)[:10],
    }


def sampling(package: str, model: Any, tokenizer: Any) -> dict[str, Any]:
    """Penalties and bias; a sampler and a processor of the notebook's own, which look at arrays as NumPy has them."""
    generate = importlib.import_module(package).generate
    utils = importlib.import_module(f"{package}.sample_utils")
    prompt = "The fox and the crow and the"
    seen: list[int] = []

    def second(logprobs: Any) -> Any:
        order = np.array(logprobs).argsort(axis=-1)
        return type(logprobs)(order[..., -2]) if package == "mlx_lm" else order[..., -2]

    def watch(tokens: Any, logits: Any) -> Any:
        seen.append(len(tokens))
        return logits

    def run(**options: Any) -> str:
        return generate(model, tokenizer, prompt, max_tokens=5, **options)

    processors = utils.make_logits_processors
    return {
        "greedy": run(sampler=utils.make_sampler(temp=0.0)),
        "nucleus of one": run(sampler=utils.make_sampler(temp=0.7, top_p=1e-6)),
        "one of k": run(sampler=utils.make_sampler(temp=0.7, top_k=1)),
        "repetition": run(logits_processors=processors(repetition_penalty=1.5, repetition_context_size=4)),
        "presence": run(logits_processors=processors(presence_penalty=2.0, frequency_penalty=0.5)),
        "bias": run(logits_processors=processors({tokenizer.encode(" king")[0]: 30.0})),
        "second": run(sampler=second),
        "watched": run(logits_processors=[watch]),
        "seen": seen[:5],
    }


def batch(package: str, model: Any, tokenizer: Any) -> dict[str, Any]:
    """Several prompts at once, then more of the same conversations."""
    batch_generate = importlib.import_module(package).batch_generate
    asked = ["Who was the fox?", "Where is the king now, and why?"]
    prompts = [
        tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True) for text in asked
    ]
    first = batch_generate(
        model, tokenizer, prompts, max_tokens=[3, 5], return_prompt_caches=True, return_token_ids=True
    )
    more = [tokenizer.encode(" And"), tokenizer.encode(" But then")]
    second = batch_generate(
        model, tokenizer, more, prompt_caches=first.caches, max_tokens=3, return_logprobs=True, verbose=False
    )
    return {
        "texts": first.texts,
        "token_ids": first.token_ids,
        "count": first.stats.generation_tokens,
        "more": second.texts,
        "logprobs": [[round(value, 3) for value in row] for row in second.logprobs],
        "none": (second.caches, second.token_ids),
        "fields": list(first.__dataclass_fields__),
    }


def prompt_caching(package: str, model: Any, tokenizer: Any, folder: Path) -> dict[str, Any]:
    """A chat whose turns go on from a cache, which is saved and read again."""
    generate = importlib.import_module(package).generate
    cache = importlib.import_module(f"{package}.models.cache")

    def say(text: str, held: Any) -> str:
        messages = [{"role": "user", "content": text}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        return generate(model, tokenizer, prompt=prompt, prompt_cache=held, max_tokens=5)

    held = cache.make_prompt_cache(model)
    first = say("Hi, my name is Ada.", held)
    other = copy.deepcopy(held)
    second = say("What is my name?", held)
    file = str(folder / f"{package}.safetensors")
    cache.save_prompt_cache(file, held, {"model": "demo", "turns": "2"})
    read, metadata = cache.load_prompt_cache(file, return_metadata=True)
    penalty = importlib.import_module(f"{package}.sample_utils").make_logits_processors(repetition_penalty=1.4)
    return {
        "texts": [first, second, say("And now?", read), say("What is my name?", other)],
        "hidden": generate(
            model, tokenizer, [29], prompt_cache=cache.load_prompt_cache(file), max_tokens=4, logits_processors=penalty
        ),
        "metadata": metadata,
        "trimmed": (cache.can_trim_prompt_cache(held), cache.trim_prompt_cache(held, 2)),
    }


def tool_use(package: str, model: Any, tokenizer: Any) -> dict[str, Any]:
    """A function as a tool, a call as a model writes it, the result as the next message."""
    generate = importlib.import_module(package).generate
    make_prompt_cache = importlib.import_module(f"{package}.models.cache").make_prompt_cache

    def multiply(a: float, b: float) -> float:
        """
        A function that multiplies two numbers

        Args:
            a: The first number to multiply
            b: The second number to multiply
        """
        return a * b

    before = tokenizer.chat_template
    tokenizer.chat_template = TOOLS
    try:
        messages: list[dict[str, Any]] = [{"role": "user", "content": "Multiply 12 and 40."}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tools=[multiply])
        held = make_prompt_cache(model)
        generate(model=model, tokenizer=tokenizer, prompt=prompt, max_tokens=2, prompt_cache=held)
        written = '<tool_call>\n{"name": "multiply", "arguments": {"a": 12, "b": 40}}\n</tool_call>'
        start, end = written.find("<tool_call>") + len("<tool_call>"), written.find("</tool_call>")
        call = json.loads(written[start:end].strip())
        result = multiply(**call["arguments"])
        messages = [{"role": "tool", "name": call["name"], "content": result}]
        answer = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        text = generate(model=model, tokenizer=tokenizer, prompt=answer, max_tokens=4, prompt_cache=held)
    finally:
        tokenizer.chat_template = before
    return {"prompt": tokenizer.decode(prompt), "answer": tokenizer.decode(answer), "text": text}


def tokens(package: str, model: Any, tokenizer: Any) -> dict[str, Any]:
    """What notebooks ask of a tokenizer."""
    importlib.import_module(package)
    ids = tokenizer.encode("a fox, <|im_end|> é\U0001f98a")
    detokenizer = tokenizer.detokenizer
    segments = []
    for token in ids:
        detokenizer.add_token(token)
        segments.append(detokenizer.last_segment)
    detokenizer.finalize()
    segments.append(detokenizer.last_segment)
    both = tokenizer._tokenizer(["a fox", "a king"])
    return {
        "ids": ids,
        "text": tokenizer.decode(ids),
        "plain": tokenizer.decode(ids, skip_special_tokens=True),
        "segments": segments,
        "streamed": detokenizer.text,
        "several": (both["input_ids"], both["attention_mask"]),
        "batch": tokenizer.batch_decode([[54, 55], ids]),
        "ends": sorted(tokenizer.eos_token_ids),
        "names": (tokenizer.eos_token, tokenizer.eos_token_id, tokenizer.bos_token, tokenizer.bos_token_id),
        "pad": (tokenizer.pad_token, tokenizer.pad_token_id),
        "vocab": (len(tokenizer), tokenizer.vocab_size, tokenizer.get_vocab()["<|im_end|>"]),
        "converted": (tokenizer.convert_tokens_to_ids("<|im_end|>"), tokenizer.convert_ids_to_tokens([54, 3])),
        "can": (tokenizer.has_thinking, tokenizer.has_tool_calling, tokenizer.has_chat_template),
        "think": (tokenizer.think_start, tokenizer.think_end_id),
    }


def converting(package: str, source: Path, target: Path) -> dict[str, Any]:
    """A model in 4 bits, and what the folder then says."""
    convert = importlib.import_module(package).convert
    with contextlib.redirect_stdout(io.StringIO()):
        convert(str(source), mlx_path=str(target), quantize=True, q_bits=4, q_group_size=32)
    load = importlib.import_module(package).load
    _, _, config = load(str(target), return_config=True)
    written = json.loads((target / "config.json").read_text())
    return {"bits": config["quantization"]["bits"], "group": config["quantization"]["group_size"], "config": written}


def steps(package: str, model: Any, tokenizer: Any) -> dict[str, Any]:
    """Token ids without a tokenizer, from the module that has the loop."""
    generate_step = importlib.import_module(f"{package}.generate").generate_step
    prompt: Any = np.array(tokenizer.encode("Once upon a time"))
    if package == "mlx_lm":
        prompt = importlib.import_module("mlx.core").array(prompt)
    found = list(generate_step(prompt, model, max_tokens=4))
    limited = [token for (token, _), _ in zip(generate_step(prompt, model, max_tokens=-1), range(3), strict=False)]
    return {
        "tokens": [token for token, _ in found],
        "logprobs": [round(float(logprobs[token]), 3) for token, logprobs in found],
        "limited": limited,
    }
