"""Prompts: their file formats, and their tokens as a server would compute them.

A `.jsonl` file has one JSON value per line, a `.json` file a list of them: a string, or an object with `prompt` (or
`inputs`), or an object with `messages`, which the chat template turns into a prompt. Any other file is plain text with
one prompt per line. Blank lines are ignored.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lorikeet.adapters.errors import HeadsError, first_line

Prompt = str | list[dict[str, Any]]
"""Text, or the messages of a conversation for the target to continue."""


@dataclass(frozen=True)
class EncodedPrompt:
    """One prompt in tokens."""

    ids: tuple[int, ...]
    inputs: str | None
    """Text that a server tokenizes to the same ids; None if there is none."""


def read_prompts(path: Path) -> list[Prompt]:
    """Every prompt of the file, in order. Raises HeadsError."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise HeadsError(f"the prompt file {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise HeadsError(f"the prompt file {path} is not UTF-8 text") from None
    if path.suffix == ".json":
        prompts = _list(path, text)
    elif path.suffix == ".jsonl":
        lines = enumerate(text.split("\n"), 1)
        prompts = [_prompt(_json(line, path, number), path, number) for number, line in lines if line.strip()]
    else:
        prompts = [line for line in text.splitlines() if line.strip()]
    if not prompts:
        raise HeadsError(f"the prompt file {path} is empty")
    return prompts


def encode_prompts(prompts: Sequence[Prompt], tokenizer: Any) -> list[EncodedPrompt]:
    """Tokens of every prompt. Raises HeadsError if the tokenizer has no chat template for messages."""
    return [_encode(prompt, tokenizer) for prompt in prompts]


def _encode(prompt: Prompt, tokenizer: Any) -> EncodedPrompt:
    if isinstance(prompt, str):
        return EncodedPrompt(tuple(tokenizer(prompt)["input_ids"]), prompt)
    if not tokenizer.chat_template:
        raise HeadsError("there are prompts with messages, but neither base nor adapter has a chat template")
    try:
        text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # a template may raise anything
        raise HeadsError(f"the chat template refuses a prompt's messages: {first_line(error)}") from None
    ids = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
    without = text.removeprefix(tokenizer.bos_token or "")
    sendable = (candidate for candidate in (text, without) if tuple(tokenizer(candidate)["input_ids"]) == ids)
    return EncodedPrompt(ids, next(sendable, None))


def _list(path: Path, text: str) -> list[Prompt]:
    values = _json(text, path, 1) if text.strip() else []
    if not isinstance(values, list):
        raise HeadsError(f"the prompt file {path} is not a JSON list; use .jsonl for one value per line")
    return [_prompt(value, path, number) for number, value in enumerate(values, 1)]


def _json(text: str, path: Path, number: int) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise HeadsError(f"the prompt file {path} is not JSON at line {number}: {first_line(error)}") from None


def _prompt(value: Any, path: Path, number: int) -> Prompt:
    fields = value if isinstance(value, dict) else {"prompt": value}
    text = fields.get("prompt", fields.get("inputs"))
    if isinstance(text, str) and text:
        return text
    messages = fields.get("messages")
    if isinstance(messages, list) and messages and all(isinstance(message, dict) for message in messages):
        return messages
    raise HeadsError(f"the prompt file {path} has an invalid entry {number}: give a text or an object with messages")
