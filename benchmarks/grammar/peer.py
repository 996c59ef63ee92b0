"""Structured output against vLLM on CPU with its `auto` backend: eight clients, eight schemas, the 200 M Llama.

Both get the same prompts, schemas, temperature and limit; tokens per second count what each has generated, and every
finished text is checked with `jsonschema`.

    python -m benchmarks.grammar.peer [--quick] [--rounds N]

`--quick` asks our server alone; vLLM is installed by `python -m benchmarks.load.peers install`.
"""

import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jsonschema
import uvloop

from benchmarks.evidence import arguments
from benchmarks.evidence.figure import Case, Cases, Raw
from benchmarks.load import adapted, peers, servers
from benchmarks.load.rounds import OURS, VLLM, alone, in_turn, speedup
from benchmarks.models.prompts import prompts

ROUNDS = 8
CLIENTS = 8
REQUESTS = {OURS: 3, VLLM: 3}
"""Requests of each client and round."""
PROMPT, MAX_TOKENS = 128, 192
TEMPERATURE = 0.8
SEED = 71_000
STRING = {"type": "string", "maxLength": 10}
ROW = {"name": STRING, "size": {"type": "integer", "minimum": 0, "maximum": 999}, "state": {"enum": ["open", "closed"]}}
PART = {"$ref": "#/$defs/part"}


@dataclass(frozen=True)
class Size:
    """How much is asked."""

    rounds: int = ROUNDS
    requests: int = REQUESTS[OURS]
    num_prompt: int = PROMPT
    max_tokens: int = MAX_TOKENS


QUICK = Size(1, 1, 16, 64)


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


def measure(size: Size | None = None, base: adapted.Base | None = None) -> Cases:
    """One case per round, both servers in turn; with a `base` only ours serves."""
    size = size or Size()
    model = peers.model_folder() if base is None else base.model
    flags = () if base is None else base.flags
    with contextlib.ExitStack() as stack:
        running = {OURS: stack.enter_context(servers.running(OURS, servers.lorikeet(model, *flags)))}
        if base is None:
            running[VLLM] = stack.enter_context(servers.running(VLLM, peers.vllm(model)))
        for number in range(-1, size.rounds):
            raw: dict[str, Any] = {"load_average": os.getloadavg()[0]}
            errors: list[str] = []
            for name in in_turn(list(running), number):
                with alone(name, running, errors):
                    raw[name] = uvloop.run(_round(running[name].port, str(model), size, SEED + 1 + number, errors))
            if number >= 0:
                yield Case(f"round {number}", raw, "; ".join(errors[:3]))


async def _round(port: int, model: str, size: Size, seed: int, errors: list[str]) -> dict[str, float]:
    texts = prompts(CLIENTS * size.requests, size.num_prompt, seed)
    started = time.monotonic()

    async def client(index: int) -> list[dict[str, int]]:
        schema, found = schemas()[index], []
        for number in range(index * size.requests, (index + 1) * size.requests):
            reply = await adapted.send(port, "/v1/completions", _body(model, texts[number], schema, seed, size))
            if reply.status != 200:
                errors.append(f"{reply.status} {reply.body[:200]!r}")
                continue
            found.append(_checked(reply.json, schema))
        return found

    answers = [each for found in await asyncio.gather(*map(client, range(CLIENTS))) for each in found]
    seconds = time.monotonic() - started
    totals = {name: sum(each[name] for each in answers) for name in ("tokens", "finished", "valid")}
    return {**totals, "requests": len(answers), "tokens_per_second": round(totals["tokens"] / seconds, 3)}


def _body(model: str, prompt: str, schema: Mapping[str, Any], seed: int, size: Size) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": size.max_tokens,
        "temperature": TEMPERATURE,
        "seed": seed,
        "structured_outputs": {"json": schema},
    }


def _checked(answer: Any, schema: Mapping[str, Any]) -> dict[str, int]:
    """Its tokens, and whether it has finished and is valid."""
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


def main() -> int:
    options = arguments.parser(__doc__, rounds=ROUNDS, quick=True).parse_args()
    if options.quick:
        return arguments.print_cases(measure(QUICK, adapted.small()), {"valid": lambda raw: valid_share(OURS, raw)})
    shares = {f"valid, {name}": lambda raw, name=name: valid_share(name, raw) for name in (OURS, VLLM)}
    return arguments.print_cases(measure(Size(options.rounds)), {"over vLLM": over_vllm, **shares})


if __name__ == "__main__":
    sys.exit(main())
