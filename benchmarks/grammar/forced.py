"""Tokens per step of the demo's adapter `json` with tokens that its grammar forces, over the same request without a
grammar; texts must be equal wherever the grammar accepts the text without it.

Counts, not times: they are the same on any machine. Each example's schema has its fields and their types.

    python -m benchmarks.grammar.forced [--quick]
"""

import itertools
import json
import random
import sys
from collections.abc import Iterator
from typing import Any

import jsonschema
import uvloop

from benchmarks.evidence import arguments
from benchmarks.evidence.figure import Case, Cases, Raw
from benchmarks.load import adapted, servers
from lorikeet.demo.data.tasks import record
from lorikeet.demo.data.tasks.example import Example, Half

EXAMPLES, QUICK = 40, 3
MAX_TOKENS = 200
SEED = 67_000
METHODS: dict[str, dict[str, Any]] = {
    "off": {},
    "lookup": {"speculative_method": "lookup", "speculative_tokens": 3, "speculative_schedule": "constant"},
}
"""How both requests are drafted for; with `off` the constrained one has the drafts of its grammar and no others."""


def measure(examples: int = EXAMPLES) -> Cases:
    """One case: tokens and steps of all examples by method, without and with their schemas."""
    with servers.running("grammar-forced", servers.lorikeet(None)) as server:
        chosen = list(itertools.islice(_held_out(), examples))
        raw, errors = dict[str, Any](), list[str]()
        for method, fields in METHODS.items():
            pairs = uvloop.run(_ask(server.port, chosen, fields))
            raw[method] = {
                "plain": _counts([plain for plain, _ in pairs]),
                "constrained": _counts([constrained for _, constrained in pairs]),
                "accepted": sum(_accepts(schema_of(each), pair[0]) for each, pair in zip(chosen, pairs, strict=True)),
            }
            for example, (plain, constrained) in zip(chosen, pairs, strict=True):
                schema = schema_of(example)
                if not _accepts(schema, constrained):
                    errors.append(f"{constrained['generated_text']!r} does not match its schema")
                if _accepts(schema, plain) and plain["generated_text"] != constrained["generated_text"]:
                    errors.append(f"the grammar changed {plain['generated_text']!r}")
        yield Case("counts", raw, "; ".join(errors[:3]))


def schema_of(example: Example) -> dict[str, Any]:
    """The fields of the example's answer, in their order, with their types."""
    types = {str: "string", int: "integer", float: "number"}
    properties = {name: {"type": types[type(value)]} for name, value in json.loads(example.answer).items()}
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def _held_out() -> Iterator[Example]:
    draw = random.Random(SEED)
    while True:
        yield from record.examples(Half.HELD_OUT, draw)


async def _ask(port: int, examples: list[Example], fields: dict[str, Any]) -> list[tuple[Any, Any]]:
    """The answers without and with the schema, one request after another: what other requests do changes no count."""
    pairs = []
    for example in examples:
        schema = {"response_format": {"type": "json_object", "schema": schema_of(example)}}
        pairs.append((await _generate(port, example, fields), await _generate(port, example, {**fields, **schema})))
    return pairs


async def _generate(port: int, example: Example, fields: dict[str, Any]) -> Any:
    parameters = {"adapter_id": "json", "max_new_tokens": MAX_TOKENS, "details": True, **fields}
    reply = await adapted.send(port, "/generate", {"inputs": example.prompt, "parameters": parameters})
    if reply.status != 200:
        raise RuntimeError(f"{reply.status} {reply.body[:300]!r}")
    return reply.json


def _counts(answers: list[Any]) -> dict[str, int]:
    tokens = sum(answer["details"]["generated_tokens"] for answer in answers)
    return {"tokens": tokens, "steps": sum(_steps(answer) for answer in answers)}


def _steps(answer: Any) -> int:
    """Without speculation there is one token per step."""
    report = answer["details"].get("speculation")
    return int(answer["details"]["generated_tokens"] if report is None else report["steps"])


def _accepts(schema: dict[str, Any], answer: Any) -> bool:
    """Whether a text that has ended matches a schema, its fields in order."""
    try:
        value = json.loads(answer["generated_text"])
        jsonschema.validate(value, schema)
    except (ValueError, jsonschema.ValidationError):
        return False
    return answer["details"]["finish_reason"] == "eos_token" and list(value) == list(schema["properties"])


def over_plain(method: str, raw: Raw) -> float:
    """Tokens per step with the grammar over those without."""
    plain, constrained = raw[method]["plain"], raw[method]["constrained"]
    return float(constrained["tokens"] / constrained["steps"] * plain["steps"] / plain["tokens"])


def main() -> int:
    options = arguments.parser(__doc__, quick=True).parse_args()
    figures = {method: lambda raw, method=method: over_plain(method, raw) for method in METHODS}
    return arguments.print_cases(measure(QUICK if options.quick else EXAMPLES), figures)


if __name__ == "__main__":
    sys.exit(main())
