"""A receipt (docs/receipts.md) as a client reads it: its request, and its differences from another receipt."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

from lorikeet.proto import digest

FORMAT = 1
BASE = "__base_model__"
"""The base model, even if the server has a default adapter."""
_PARTS = ("base_digest", "tokenizer_digest", "dtype", "device", "max_total_tokens")
_SAMPLING = (
    *("top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty"),
    *("seed", "stop"),
)
"""Parameters that are fields of a request on every route, with the same names."""

_LATER = ("min_tokens", "stop_token_ids", "allowed_token_ids", "bad_words")
"""The same, but absent from receipts of version 0.1 and from requests where they ask for nothing."""
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
_LONGEST_NAME = 256

Prompt = str | list[int] | list[dict[str, Any]]
"""A text, its token ids, or the messages of a chat."""


class ReceiptError(Exception):
    """It is not a receipt, or lacks what a replay needs; one sentence."""


@dataclass(frozen=True)
class Receipt:
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
        given = self.values["prompt"].get("token_ids") if prompt is None else prompt
        if given is None:
            raise ReceiptError("the receipt holds only the hash of its prompt: give the prompt")
        if isinstance(given, list):
            ids = [each for each in given if isinstance(each, int)]
            if len(ids) < len(given):
                return "/v1/chat/completions", {"messages": given, **self._openai()}
            if digest.of_tokens(ids) != self.values["prompt"]["sha256"]:
                raise ReceiptError("the token ids that were given are not those of the receipt's prompt")
        if self.values["parameters"]["logit_bias"]:  # which LoRAX's routes don't know
            return "/v1/completions", {"prompt": given, **self._openai()}
        return "/generate", {"inputs": given, "parameters": self._native()}

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
        "request_id": isinstance(name, str) and name.isascii() and name.isprintable() and len(name) <= _LONGEST_NAME,
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
    return ids is None or (isinstance(ids, list) and all(type(each) is int and 0 <= each < 1 << 32 for each in ids))


def found_in(text: str) -> Iterator[Receipt]:
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
        for each in value if isinstance(value, list) else [value]:
            yield Receipt.read(_inner(each))


def _inner(value: Any) -> Any:
    """The receipt in a response, or `value` itself."""
    for outer in (value, value.get("details")) if isinstance(value, dict) else ():
        if isinstance(outer, dict) and isinstance(outer.get("receipt"), dict):
            return outer["receipt"]
    return value


def different_parts(first: Receipt, second: Receipt) -> list[str]:
    """The inputs of generation that differ, one line each; the version comes last."""
    before, after = first.values, second.values
    pairs: dict[str, tuple[Any, Any]] = {
        "prompt": (before["prompt"]["sha256"], after["prompt"]["sha256"]),
        "adapter digest": ((before["adapter"] or {}).get("digest"), (after["adapter"] or {}).get("digest")),
        **{name.replace("_", " "): (before[name], after[name]) for name in _PARTS},
        **{name.replace("_", " "): (before.get(name), after.get(name)) for name in ("quantization", "kv_cache_dtype")},
        "number of ranks": (before.get("num_ranks", 1), after.get("num_ranks", 1)),
    }
    for name, value in before["parameters"].items():
        pairs[f"parameter {name}"] = (value, after["parameters"].get(name))
    pairs["version"] = (before.get("version"), after.get("version"))
    return [f"{name}: {_short(old)}, now {_short(new)}" for name, (old, new) in pairs.items() if old != new]


def first_difference(first: list[int], second: list[int]) -> int:
    """The position of the first token that differs; the end of the shorter list if there is none."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, (one, other) in pairs if one != other), min(len(first), len(second)))


def _short(value: Any) -> str:
    text = "none" if value is None else str(value)
    return text if len(text) <= 72 else f"{text[:72]}…"
