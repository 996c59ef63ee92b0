"""`lorikeet-replay`: repeats the request of a receipt and compares the tokens."""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import Any, Self

from lorikeet.launcher.cli.client import Client, ServerError, add_server_options, command_parser, token_of
from lorikeet.proto import digest
from lorikeet.proto.params import NUMBERS

FORMAT = 1
BASE = "__base_model__"
"""The base model, even if the server has a default adapter."""
_PARTS = ("base_digest", "tokenizer_digest", "dtype", "device", "max_total_tokens")
_SAMPLING = (
    *("top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty"),
    *("seed", "stop"),
)
"""Parameters that are fields of a request on every route, with the same names."""

_FIRST_NUMBERS = (*_SAMPLING, "temperature", "top_k", "typical_p")
_LATER = (
    *("min_tokens", "stop_token_ids", "allowed_token_ids", "bad_words"),
    *(name for name in NUMBERS if name not in _FIRST_NUMBERS),
)
"""Fields that are absent from receipts of version 0.1, and from requests that do not set them."""
_STRUCTURED_OUTPUTS = {"json_schema": "json", "regex": "regex", "choice": "choice", "grammar": "grammar"}
"""The field of `structured_outputs` for each kind of grammar."""

_PARAMETERS = frozenset(
    (
        *_SAMPLING,
        "ignore_eos",
        "temperature",
        "do_sample",
        "max_new_tokens",
        "watermark",
        "top_k",
        "typical_p",
        "logit_bias",
    )
)
_MAX_NAME_LEN = 256

Prompt = str | list[int] | list[dict[str, Any]]
"""A text, its token ids, or the messages of a chat."""


class ReceiptError(Exception):
    """Text is not a receipt, or lacks what a replay needs. The message is one sentence."""


@dataclass(frozen=True)
class SavedReceipt:
    """The receipt of one completion."""

    values: dict[str, Any]

    @classmethod
    def read(cls, values: Any) -> Self:
        """Raises ReceiptError."""
        if not isinstance(values, dict) or not isinstance(values.get("receipt"), int):
            raise ReceiptError("this is not a receipt")
        if values["receipt"] != FORMAT:
            raise ReceiptError(f"receipt format {values['receipt']} is not supported, only {FORMAT}")
        missing = [name for name in ("parameters", "prompt", "output", "adapter", *_PARTS) if name not in values]
        if missing:
            raise ReceiptError(f"the receipt lacks {', '.join(missing)}")
        _check_kinds(values)
        receipt = cls(values)
        for name in ("prompt", "output"):
            ids = values[name].get("token_ids")
            if ids is not None and digest.of_tokens(ids) != values[name]["sha256"]:
                raise ReceiptError(f"the token ids of its {name} do not match their hash: the receipt was modified")
        return receipt

    @property
    def request_id(self) -> str:
        return str(self.values.get("request_id") or "")

    @property
    def output_ids(self) -> list[int] | None:
        """None if the receipt holds only their hash."""
        ids: list[int] | None = self.values["output"].get("token_ids")
        return ids

    @property
    def num_tokens(self) -> int:
        return int(self.values["output"]["num_tokens"])

    def request(self, prompt: Prompt | None = None) -> tuple[str, dict[str, Any]]:
        """Path and body of the same request; every field is explicit, so that no server default applies.

        `prompt` is for receipts that hold only its hash. Raises ReceiptError.
        """
        content = self.values["prompt"].get("token_ids") if prompt is None else prompt
        if content is None:
            raise ReceiptError("the receipt holds only the hash of its prompt: give the prompt")
        if isinstance(content, list):
            ids = [token for token in content if isinstance(token, int)]
            if len(ids) < len(content):
                return "/v1/chat/completions", {"messages": content, **self._openai()}
            if digest.of_tokens(ids) != self.values["prompt"]["sha256"]:
                raise ReceiptError("the token ids that were given are not those of the receipt's prompt")
        if self.values["parameters"]["logit_bias"]:  # which LoRAX's routes don't know
            return "/v1/completions", {"prompt": content, **self._openai()}
        return "/generate", {"inputs": content, "parameters": self._native()}

    def _common(self) -> dict[str, Any]:
        parameters = self.values["parameters"]
        later = {name: parameters[name] for name in _LATER if parameters.get(name)}
        if not parameters.get("skip_special_tokens", True):
            later["skip_special_tokens"] = False
        return {
            **later,
            **{name: parameters[name] for name in _SAMPLING},
            "ignore_eos_token": parameters["ignore_eos"],
            "temperature": parameters["temperature"] if parameters["do_sample"] else 0.0,
            "speculative_verification": "shared-noise",
            "receipt": True,
        } | self._grammar()

    def _grammar(self) -> dict[str, Any]:
        """The field of the request that its output follows, if any."""
        grammar = self.values["parameters"].get("grammar")
        return {"structured_outputs": {_STRUCTURED_OUTPUTS[grammar["kind"]]: grammar["value"]}} if grammar else {}

    def _native(self) -> dict[str, Any]:
        parameters, adapter = self.values["parameters"], self.values["adapter"]
        body = {
            **self._common(),
            "do_sample": parameters["do_sample"],
            "max_new_tokens": parameters["max_new_tokens"],
            "truncate": self.values["prompt"]["num_tokens"],
            "watermark": parameters["watermark"] is not None,
            "return_full_text": False,
        }
        if parameters["top_k"]:
            body["top_k"] = parameters["top_k"]
        if parameters["typical_p"] < 1.0:
            body["typical_p"] = parameters["typical_p"]
        if adapter is not None and adapter.get("merged"):
            body["merged_adapters"] = adapter["merged"]
        else:
            body["adapter_id"] = BASE if adapter is None else adapter["id"]
        return body | self._source()

    def _openai(self) -> dict[str, Any]:
        parameters, adapter = self.values["parameters"], self.values["adapter"]
        if parameters["watermark"]:
            raise ReceiptError("OpenAI's routes have no watermarks: the prompt must be a text")
        merged = (adapter or {}).get("merged")
        return {
            **self._common(),
            "model": BASE if adapter is None or merged else adapter["id"],
            **({"merged_adapters": merged} if merged else {}),
            "max_tokens": parameters["max_new_tokens"],
            "top_k": parameters["top_k"],
            "typical_p": parameters["typical_p"],
            "logit_bias": {str(token_id): bias for token_id, bias in parameters["logit_bias"]},
        } | self._source()

    def _source(self) -> dict[str, Any]:
        source = (self.values["adapter"] or {}).get("source")
        return {} if source is None else {"adapter_source": source}


def _check_kinds(values: dict[str, Any]) -> None:
    """Raises ReceiptError for a value that no server writes."""
    parameters, adapter, name = values["parameters"], values["adapter"], values.get("request_id") or ""
    is_right = {
        "prompt": _is_tokens(values["prompt"]),
        "output": _is_tokens(values["output"]),
        "parameters": isinstance(parameters, dict) and parameters.keys() >= _PARAMETERS,
        "adapter": adapter is None or (isinstance(adapter, dict) and ("id" in adapter or "merged" in adapter)),
        "request_id": isinstance(name, str) and name.isascii() and name.isprintable() and len(name) <= _MAX_NAME_LEN,
    }
    if wrong := [name for name, right in is_right.items() if not right]:
        raise ReceiptError(f"the receipt's {', '.join(wrong)} cannot be read")
    pairs = parameters["logit_bias"]
    is_number = isinstance(parameters["typical_p"], int | float)
    if not is_number or not isinstance(pairs, list) or not all(isinstance(p, list) and len(p) == 2 for p in pairs):
        raise ReceiptError("the receipt's parameters cannot be read")


def _is_tokens(value: Any) -> bool:
    """Whether it is a number of tokens with their hash, and perhaps their ids."""
    if not isinstance(value, dict) or not isinstance(value.get("sha256"), str):
        return False
    ids, number = value.get("token_ids"), value.get("num_tokens")
    if type(number) is not int:
        return False
    return ids is None or (isinstance(ids, list) and all(type(token) is int and 0 <= token < 1 << 32 for token in ids))


def found_in(text: str) -> Iterator[SavedReceipt]:
    """Receipts in a file's text: one, JSON lines, a list, or responses that include one. Raises ReceiptError."""
    try:
        values = [json.loads(text)]
    except RecursionError:
        raise ReceiptError("it is not a receipt: it is nested too deeply") from None
    except ValueError:
        try:
            values = [json.loads(line) for line in text.splitlines() if line.strip()]
        except (ValueError, RecursionError) as error:
            raise ReceiptError(f"it is not JSON: {error}") from None
    for value in values:
        for entry in value if isinstance(value, list) else [value]:
            yield SavedReceipt.read(_inner(entry))


def _inner(value: Any) -> Any:
    """The receipt in a response, or `value` itself."""
    for outer in (value, value.get("details")) if isinstance(value, dict) else ():
        if isinstance(outer, dict) and isinstance(outer.get("receipt"), dict):
            return outer["receipt"]
    return value


def different_parts(first: SavedReceipt, second: SavedReceipt) -> list[str]:
    """The inputs of generation that differ, one line each; the version comes last."""
    values, other_values = first.values, second.values
    pairs: dict[str, tuple[Any, Any]] = {
        "prompt": (values["prompt"]["sha256"], other_values["prompt"]["sha256"]),
        "adapter digest": ((values["adapter"] or {}).get("digest"), (other_values["adapter"] or {}).get("digest")),
        **{name.replace("_", " "): (values[name], other_values[name]) for name in _PARTS},
        **{
            name.replace("_", " "): (values.get(name), other_values.get(name))
            for name in ("quantization", "kv_cache_dtype")
        },
        "number of ranks": (values.get("num_ranks", 1), other_values.get("num_ranks", 1)),
    }
    for name, value in values["parameters"].items():
        pairs[f"parameter {name}"] = (value, other_values["parameters"].get(name))
    pairs["version"] = (values.get("version"), other_values.get("version"))
    return [f"{name}: {_short(old)}, now {_short(new)}" for name, (old, new) in pairs.items() if old != new]


def first_difference(first: list[int], second: list[int]) -> int:
    """The position of the first token that differs; the end of the shorter list if there is none."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, (one, other) in pairs if one != other), min(len(first), len(second)))


def _short(value: Any) -> str:
    text = "none" if value is None else str(value)
    return text if len(text) <= 72 else f"{text[:72]}…"


@dataclass(frozen=True)
class Outcome:
    """The result of one replay."""

    is_identical: bool
    num_tokens: int = 0
    """Tokens of the new output."""
    position: int | None = None
    """Position of the first token that differs; None if none does, or if the receipt holds only hashes."""
    parts: list[str] = field(default_factory=list)
    """Other inputs of generation that differ."""
    error: str = ""
    """Why there was no response to compare."""


_EXAMPLES = """examples:
  lorikeet-replay answer.json
  lorikeet-replay receipts.jsonl --url http://another:3000 --prompt prompts.jsonl
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line, by default that of this process: 0 if every output was identical, else 1."""
    options = parser().parse_args(arguments)
    try:
        _check_token(token_of(options) or "")
        client = Client(options.url, token=token_of(options))
        receipts = list(found_in(_text_of(options.receipt)))
        if not receipts:
            raise ReceiptError(f"{options.receipt} contains no receipt")
        prompts = _prompts(options.prompt, receipts)
    except (ReceiptError, OSError, ValueError) as error:
        print(_printable(f"lorikeet-replay: {error}"), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return _replay_all(client, receipts, prompts)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = command_parser(
        "lorikeet-replay",
        "Repeats the request of a receipt: exit code 0 if the tokens are the same, else 1.",
        _EXAMPLES,
    )
    result.add_argument(
        "receipt", help="file with a receipt, a response that includes one, or one per line; - reads standard input"
    )
    add_server_options(result)
    result.add_argument(
        "--prompt",
        metavar="FILE",
        help="the prompt of a receipt without one: text, or as JSON token ids or chat messages;"
        " for several receipts one JSON line each, in the same order",
    )
    return result


def replay(client: Client, receipt: SavedReceipt, prompt: Prompt | None = None) -> Outcome:
    """Repeat the request and compare."""
    try:
        path, body = receipt.request(prompt)
        headers = {"x-request-id": receipt.request_id} if receipt.request_id else {}
        answer = client.post(path, body, headers)
    except ServerError as error:
        return Outcome(False, error=f"the server rejected the request: {error}")
    except (HTTPException, ValueError):
        return Outcome(False, error=f"{client.url} does not answer as a Lorikeet server does")
    except OSError as error:
        return Outcome(False, error=f"cannot connect to {client.url}: {error}")
    except ReceiptError as error:
        return Outcome(False, error=str(error))
    try:
        again = next(found_in(json.dumps(answer)))
    except (ReceiptError, StopIteration) as error:
        return Outcome(False, error=f"the response includes no receipt to compare: {error}")
    return compared(receipt, again)


def compared(receipt: SavedReceipt, again: SavedReceipt) -> Outcome:
    """A receipt and that of its replay."""
    parts = different_parts(receipt, again)
    if receipt.values["output"]["sha256"] == again.values["output"]["sha256"]:
        return Outcome(True, again.num_tokens, parts=parts)
    first_ids, second_ids = receipt.output_ids, again.output_ids
    position = None if first_ids is None or second_ids is None else first_difference(first_ids, second_ids)
    return Outcome(False, again.num_tokens, position, parts)


def sentences(receipt: SavedReceipt, outcome: Outcome) -> list[str]:
    """The printed lines of one replay."""
    if outcome.error:
        return [outcome.error]
    if outcome.is_identical:
        return [f"identical: {outcome.num_tokens} tokens", *(f"  different {part}" for part in outcome.parts)]
    place = "" if outcome.position is None else f" from token {outcome.position} on"
    lines = [f"different{place}: {receipt.num_tokens} tokens before, {outcome.num_tokens} now"]
    lines += [f"  different {part}" for part in outcome.parts]
    if all(part.startswith("version:") for part in outcome.parts):
        lines.append("  only the tokens differ, all inputs are the same")
    return lines


def _replay_all(client: Client, receipts: list[SavedReceipt], prompts: list[Prompt | None]) -> int:
    num_identical = 0
    for receipt, prompt in zip(receipts, prompts, strict=True):
        try:
            outcome = replay(client, receipt, prompt)
        except KeyboardInterrupt:
            return 130
        num_identical += outcome.is_identical
        name = f"{receipt.request_id}: " if len(receipts) > 1 else ""
        lines = [name + sentences(receipt, outcome)[0], *sentences(receipt, outcome)[1:]]
        print("\n".join(map(_printable, lines)), flush=True)
    if len(receipts) != 1:
        print(f"{num_identical} of {len(receipts)} identical")
    return 0 if num_identical == len(receipts) else 1


def _check_token(token: str) -> None:
    if not (token.isascii() and token.isprintable()):
        raise ReceiptError("the token has characters that no header may have, perhaps a line end")


def _printable(text: str) -> str:
    """The text with escapes for what a terminal would obey."""
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode() for character in text
    )


def _text_of(name: str) -> str:
    return sys.stdin.read() if name == "-" else Path(name).read_text()


def _prompts(path: str | None, receipts: list[SavedReceipt]) -> list[Prompt | None]:
    """For each of the receipts. Raises ReceiptError or OSError."""
    if path is None:
        return [None] * len(receipts)
    text = Path(path).read_text()
    if len(receipts) == 1:
        return [_prompt(text)]
    try:
        values = [json.loads(line) for line in text.splitlines() if line.strip()]
    except ValueError as error:
        raise ReceiptError(f"{path} must contain one JSON line for each receipt: {error}") from None
    if len(values) != len(receipts):
        raise ReceiptError(f"{path} contains {len(values)} prompts for {len(receipts)} receipts")
    return [value if isinstance(value, str) or _is_structured(value) else str(value) for value in values]


def _prompt(text: str) -> Prompt:
    """JSON of token ids or messages is parsed; everything else is the text of the prompt."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if _is_structured(value) else text


def _is_structured(value: Any) -> bool:
    if not isinstance(value, list) or not value:
        return False
    return all(type(item) is int for item in value) or all(isinstance(item, dict) and "role" in item for item in value)


if __name__ == "__main__":
    sys.exit(main())
