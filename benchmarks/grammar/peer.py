"""Structured output against vLLM on CPU with its `auto` backend: eight clients, eight schemas, the 200 M Llama.

Both get the same prompts, schemas, temperature and limit; tokens per second count what each has generated, and every
finished text is checked with `jsonschema`.

vLLM is installed by `python -m benchmarks.load.peers install`.
"""

import asyncio
import contextlib
import json
import os
import time
from collections.abc import Mapping
from typing import Any

import jsonschema
import uvloop

from benchmarks.evidence.figure import Case, Cases, Raw
from benchmarks.load import adapted, peers, servers
from benchmarks.load.rounds import OURS, VLLM, alone, in_turn, speedup
from benchmarks.models.prompts import prompts

ROUNDS = 8
CLIENTS = 8
REQUESTS = 3
"""Requests of each client and round."""
PROMPT, MAX_TOKENS = 128, 192
TEMPERATURE = 0.8
SEED = 71_000
STRING = {"type": "string", "maxLength": 10}
ROW = {"name": STRING, "size": {"type": "integer", "minimum": 0, "maximum": 999}, "state": {"enum": ["open", "closed"]}}
PART = {"$ref": "#/$defs/part"}


def schemas() -> list[dict[str, Any]]:
    """One for each client: records, lists, choices, numbers and references, with outputs of bounded length."""
    return [
        _object(ROW),
        _object({"rows": {"type": "array", "items": _object(ROW), "minItems": 2, "maxItems": 3}}),
        _object({"kind": {"enum": ["red", "green"]}, "code": {"type": "string", "pattern": "^[A-Z]{3}-[0-9]{4}$"}}),
        _object({"first": STRING, "last": STRING, "place": _object({"street": STRING, "number": {"type": "integer"}})}),
        _object({"value": {"anyOf": [{"type": "boolean"}, {"type": "null"}, STRING]}, "note": STRING, "tag": STRING}),
        _object({"when": {"type": "string", "format": "date"}, "id": {"type": "string", "format": "uuid"}}),
        {**_object({"left": PART, "right": PART}), "$defs": {"part": _object(ROW)}},
        _object({f"field{number}": STRING for number in range(6)}),
    ]  # fmt: skip


def _object(properties: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": dict(properties),
        "required": list(properties),
        "additionalProperties": False,
    }


def measure() -> Cases:
    """One case per round, both servers in turn."""
    model = peers.model_folder()
    with contextlib.ExitStack() as stack:
        running = {OURS: stack.enter_context(servers.running(OURS, servers.lorikeet(model)))}
        running[VLLM] = stack.enter_context(servers.running(VLLM, peers.vllm(model)))
        for number in range(-1, ROUNDS):
            raw: dict[str, Any] = {"load_average": os.getloadavg()[0]}
            errors: list[str] = []
            for name in in_turn(list(running), number):
                with alone(name, running, errors):
                    raw[name] = uvloop.run(_round(running[name].port, str(model), SEED + 1 + number, errors))
            if number >= 0:
                yield Case(f"round {number}", raw, "; ".join(errors[:3]))


async def _round(port: int, model: str, seed: int, errors: list[str]) -> dict[str, float]:
    texts = prompts(CLIENTS * REQUESTS, PROMPT, seed)
    started = time.monotonic()

    async def client(index: int) -> list[dict[str, int]]:
        schema, checked = schemas()[index], []
        for number in range(index * REQUESTS, (index + 1) * REQUESTS):
            reply = await adapted.send(port, "/v1/completions", _body(model, texts[number], schema, seed))
            if reply.status != 200:
                errors.append(f"{reply.status} {reply.body[:200]!r}")
                continue
            checked.append(_checked(reply.json, schema))
        return checked

    answers = [answer for found in await asyncio.gather(*map(client, range(CLIENTS))) for answer in found]
    seconds = time.monotonic() - started
    totals = {name: sum(answer[name] for answer in answers) for name in ("tokens", "finished", "valid")}
    return {**totals, "requests": len(answers), "tokens_per_second": round(totals["tokens"] / seconds, 3)}


def _body(model: str, prompt: str, schema: Mapping[str, Any], seed: int) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": MAX_TOKENS,
        "temperature": TEMPERATURE,
        "seed": seed,
        "structured_outputs": {"json": schema},
    }


def _checked(answer: Any, schema: Mapping[str, Any]) -> dict[str, int]:
    """The number of an answer's tokens, and whether it has finished and is valid."""
    (choice,) = answer["choices"]
    has_finished = choice["finish_reason"] == "stop"
    is_valid = False
    with contextlib.suppress(ValueError, jsonschema.ValidationError):
        jsonschema.validate(json.loads(choice["text"]), schema, format_checker=jsonschema.FormatChecker())
        is_valid = True
    return {
        "tokens": answer["usage"]["completion_tokens"],
        "finished": has_finished,
        "valid": has_finished and is_valid,
    }


def over_vllm(raw: Raw) -> float:
    """Tokens per second."""
    return speedup(OURS, VLLM, raw)


def valid_share(name: str, raw: Raw) -> float:
    """Share of valid outputs among the finished outputs of a server."""
    return float(raw[name]["valid"] / max(1, raw[name]["finished"]))
