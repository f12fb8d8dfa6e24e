"""Answers that are JSON of a schema: a grammar leaves the model no other way to write them.

pip install 'penstock[grammar]'
python examples/json_schema.py [MODEL]
"""

import json
import sys

import penstock

SCHEMA = {
    "type": "object",
    "properties": {
        "animal": {"enum": ["fox", "crow", "wolf"]},
        "age": {"type": "integer", "minimum": 1, "maximum": 9},
        "clever": {"type": "boolean"},
    },
    "required": ["animal", "age", "clever"],
    "additionalProperties": False,
}


def main() -> None:
    llm = penstock.load(sys.argv[1] if len(sys.argv) > 1 else None)
    wanted = {"type": "json_schema", "json_schema": {"name": "animal", "schema": SCHEMA}}
    question = [{"role": "user", "content": "Who lives in the forest? Answer in JSON."}]
    answer = llm.chat(question, max_tokens=100, temperature=0.8, seed=1, response_format=wanted)
    found = json.loads(answer.text)
    print(f"{found['animal']}, {found['age']} years old, {'clever' if found['clever'] else 'not so clever'}")


if __name__ == "__main__":
    main()
