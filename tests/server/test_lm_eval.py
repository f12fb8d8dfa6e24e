"""lm-eval's local-completions: its requests as recorded, and where it is installed the program itself."""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.server.common import error_of

PATH = "/v1/completions"
QUESTIONS = [
    {"question": "Once upon a time there was a", "choices": ["little fox", "xq blorp of"], "answer": 0},
    {"question": "The king was", "choices": ["zzk qqq", "very happy"], "answer": 1},
]
TASKS = {
    "choice": """
task: penstock_choice
output_type: multiple_choice
doc_to_choice: "{{choices}}"
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
metric_list:
  - metric: acc
""",
    "generate": """
task: penstock_generate
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[answer]}}"
generation_kwargs:
  until: ["."]
  max_gen_toks: 16
metric_list:
  - metric: exact_match
""",
    "rolling": """
task: penstock_rolling
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}}"
metric_list:
  - metric: word_perplexity
""",
}


def logprob(llm, context: list[int], end: list[int]) -> float:
    """Of tokens behind others."""
    logits = llm.logits([*context, *end]).astype(np.float64)
    best = logits.max(axis=1, keepdims=True)
    rows = logits - best - np.log(np.exp(logits - best).sum(axis=1, keepdims=True))
    return sum(rows[len(context) + n - 1, token] for n, token in enumerate(end))


def test_the_requests_of_generate_until(place, llm):
    ids = llm.tokenizer.encode("The king was", add_special_tokens=False)
    asked: dict[str, Any] = {"prompt": [ids], "model": "demo", "max_tokens": 16, "temperature": 0, "seed": 1234}
    body = place.client.post(PATH, json=asked | {"stop": [".", "<|endoftext|>"]}).json()
    want = llm.generate(ids, max_tokens=16, stop=[".", "<|endoftext|>"])
    assert body["choices"][0]["text"] == want.text and body["choices"][0]["index"] == 0


def test_the_tokenizer_of_the_server(place, llm):
    """tokenizer_backend=remote: vLLM's paths."""
    info = place.client.get("/tokenizer_info").json()
    tokenizer = llm.tokenizer
    [eos] = place.client.post("/tokenize", json={"prompt": info["eos_token"], "add_special_tokens": False}).json()[
        "tokens"
    ]
    assert eos == min(tokenizer.eos_ids) and info["chat_template"] == tokenizer.chat_template
    assert info["model_max_length"] == llm.max_context and info["pad_token"] is None
    for special in (True, False):
        asked = {"prompt": "The king", "add_special_tokens": special, "model": "demo"}
        found = place.client.post("/tokenize", json=asked).json()
        assert found["tokens"] == tokenizer.encode("The king", add_special_tokens=special)
        assert (found["count"], found["max_model_len"]) == (len(found["tokens"]), llm.max_context)
    assert place.client.post("/tokenize", json={"prompt": "The king"}).json()["tokens"] == tokenizer.encode("The king")
    assert (
        place.client.post("/detokenize", json={"tokens": [eos], "model": "demo"}).json()["prompt"] == info["eos_token"]
    )
    both = error_of(place.client.post("/tokenize", json={"content": "a", "prompt": "a"}))
    assert "expected one of them" in both["message"]
    for path, asked in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})):
        assert place.client.post(path, json=asked | {"model": "other"}).status_code == 404


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("lm_eval") is None, reason="lm_eval is not on the path")
def test_lm_eval_runs(place, llm, tmp_path: Path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    for name, task in TASKS.items():
        data = f"dataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {rows}\ntest_split: test\n"
        (tmp_path / f"{name}.yaml").write_text(task + data)
    url = f"{place.url}{PATH}"
    model = f"model=demo,base_url={url},tokenizer_backend=remote,num_concurrent=4,max_length={llm.max_context}"
    command = ["lm_eval", "run", "--model", "local-completions", "--model_args", model, "--include_path", tmp_path]
    command += ["--tasks", *(f"penstock_{name}" for name in TASKS), "--output_path", tmp_path / "out", "--log_samples"]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub")}
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    [file] = tmp_path.glob("out/**/results_*.json")
    results = json.loads(file.read_text())["results"]
    assert set(results) == {f"penstock_{name}" for name in TASKS}

    def samples(name: str) -> list[dict[str, Any]]:
        [found] = file.parent.glob(f"samples_penstock_{name}_*.jsonl")
        return sorted(map(json.loads, found.read_text().splitlines()), key=lambda sample: sample["doc_id"])

    encode = llm.tokenizer.encode
    for sample, row in zip(samples("choice"), QUESTIONS, strict=True):
        context = encode(row["question"], add_special_tokens=False)
        for [[value, _]], choice in zip(sample["resps"], row["choices"], strict=True):
            end = encode(f"{row['question']} {choice}", add_special_tokens=False)[len(context) :]
            assert float(value) == pytest.approx(logprob(llm, context, end), abs=1e-4)
    for sample, row in zip(samples("generate"), QUESTIONS, strict=True):
        ids = encode(row["question"], add_special_tokens=False)
        assert sample["resps"] == [[llm.generate(ids, max_tokens=16, stop=["."]).text]]
    eos = min(llm.tokenizer.eos_ids)
    total = sum(logprob(llm, [eos], encode(row["question"], add_special_tokens=False)) for row in QUESTIONS)
    words = sum(len(row["question"].split()) for row in QUESTIONS)
    assert results["penstock_rolling"]["word_perplexity,none"] == pytest.approx(np.exp(-total / words), rel=1e-4)
