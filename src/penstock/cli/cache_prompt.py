"""penstock cache_prompt: read a prompt once and keep what was computed, for `generate --prompt-cache-file`."""

import time
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli._foreign import LOADING, refused
from penstock.cli._model import ModelOptions, Reading, TemplateOptions, UsageError, note, rate, set_template, verb
from penstock.cli.generate import PromptOptions, encoded
from penstock.units import amount

_FOREIGN = (*LOADING, refused("--eos-token", "--extra-eos-token of penstock generate ends answers"))


@verb(_FOREIGN)
def cache_prompt(
    *,
    model: ModelOptions,
    prompt: PromptOptions,
    template: TemplateOptions,
    ignore_chat_template: Annotated[
        bool, typer.Option("--ignore-chat-template", help="Read the prompt as it is.")
    ] = False,
    prompt_cache_file: Annotated[
        str | None, typer.Option("--prompt-cache-file", metavar="FILE", help="Where to write; .safetensors.")
    ] = None,
) -> None:
    """Read a prompt and write the state of the model behind it to a file.

    penstock generate --prompt-cache-file goes on from there, with the same model and the same --dtype, --state-dtype
    and --activations. The message stays open: the prompt of generate goes on in it, as with mlx-lm. The file is one
    of penstock's sessions (penstock.restore reads it too), under a temporary name until it is whole.

    \b
    Examples:
      penstock cache_prompt -p "Here is a long text: ..." --prompt-cache-file text.safetensors
      cat book.txt | penstock cache_prompt -p - --prompt-cache-file book.safetensors
    """
    model.follow()
    if prompt_cache_file is None:
        raise UsageError("--prompt-cache-file: is missing, expected the file to write")
    if prompt.prompt is None and prompt.file is None:
        raise UsageError("--prompt: is missing, expected a text, or - for standard input")
    variables, own_template = template.variables(), template.template()
    messages = [*template.messages(), {"role": "user", "content": prompt.read()}]
    from penstock.engine.session import check_target

    check_target(prompt_cache_file)
    llm = model.load(note)
    if own_template is not None:
        set_template(llm.tokenizer, own_template)
    chat = {"variables": variables, "allow_special_in_messages": template.allow_special_in_messages}
    tokens = encoded(llm, messages, None, chat, ignore_chat_template, part="open")
    reading, start = Reading(len(tokens)), time.perf_counter()
    with llm.session() as session:
        try:
            session.append(tokens, reading)
        finally:
            reading.close()
        seconds = time.perf_counter() - start
        session.save(prompt_cache_file)
    note(
        f"Processed {len(tokens)} tokens ({rate(len(tokens), seconds):.2f} tok/s)\n"
        f"Peak memory: {llm.stats().peak_memory / 1e9:.3f} GB"
    )
    print(f"{prompt_cache_file}: {len(tokens)} tokens, {amount(Path(prompt_cache_file).stat().st_size)}")
