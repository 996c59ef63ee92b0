"""Structured output in the whole server: outputs match random schemas, and neither the draft source nor the loss of a
shard changes one.
"""

import datetime
import json
import math
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import openai
import pydantic
import pytest

from lorikeet.launcher import Client
from lorikeet.launcher.cli.client import Answer, ServerError
from tests.e2e.conftest import Replicas
from tests.oracles.random_schemas import Schema, schemas

SEED = 22
PROMPT = 'Record:\nname = "Wamiko"\nscore = 93\n\nAs JSON:\n'
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {},
    "hot": {"do_sample": True, "temperature": 1.5, "seed": 7},
}
METHODS: dict[str, dict[str, Any]] = {
    "off": {"speculative_tokens": 0},
    "lookup": {"speculative_method": "lookup", "speculative_schedule": "constant"},
    "draft": {
        "speculative_method": "draft",
        "speculative_verification": "shared-noise",
        "speculative_schedule": "constant",
    },
    "medusa": {"speculative_method": "medusa", "speculative_schedule": "constant", "heads_id": "heads"},
}
CHECKER = jsonschema.FormatChecker()


@CHECKER.checks("date", raises=ValueError)
def is_date(value: object) -> bool:
    """RFC 3339 has a year 0, which is a leap year; Python has none."""
    if isinstance(value, str):
        datetime.date.fromisoformat(value.replace("0000-", "2000-", 1) if value.startswith("0000-") else value)
    return True


def ask(client: Client, schema: Schema, **parameters: Any) -> Answer:
    response_format = {"type": "json_object", "schema": schema}
    return client.generate(PROMPT, **{"max_new_tokens": 1500, "response_format": response_format, **parameters})


def is_taken(client: Client, schema: Schema) -> bool:
    """Whether the server takes the schema: it rejects what it cannot enforce."""
    try:
        ask(client, schema, max_new_tokens=1)
    except ServerError as error:
        assert error.status == 422
        return False
    return True


def check(url: str, number: int) -> None:
    """Ask for `number` schemas with every sampling and method, and compare."""
    client = Client(url)
    with ThreadPoolExecutor(16) as pool:
        drawn = schemas(number, SEED)
        is_good = pool.map(lambda schema: is_taken(client, schema), drawn)
        taken = [schema for schema, good in zip(drawn, is_good, strict=True) if good]
        assert len(taken) >= 0.9 * number
        cases = [(schema, sampling) for schema in taken for sampling in SAMPLING.values()]
        rows = [
            [pool.submit(ask, client, schema, **sampling, **method) for method in METHODS.values()]
            for schema, sampling in cases
        ]
        unfinished = 0
        for (schema, _), row in zip(cases, rows, strict=True):
            answers = [each.result() for each in row]
            assert len({answer.text for answer in answers}) == 1, schema
            if answers[0].details["finish_reason"] == "length":
                unfinished += 1
                continue
            jsonschema.validate(json.loads(answers[0].text), schema, format_checker=CHECKER)
    assert unfinished <= max(1, 0.01 * len(cases))


def test_outputs_match_random_schemas(replicas: Replicas) -> None:
    check(replicas.launched.url, 4)


@pytest.mark.long
def test_outputs_match_five_hundred_random_schemas(replicas: Replicas) -> None:
    check(replicas.launched.url, 500)


LIST = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string", "minLength": 5, "maxLength": 9}, "score": {"enum": [1, 20, 300]}},
        "required": ["name", "score"],
        "additionalProperties": False,
    },
    "minItems": 8,
    "maxItems": 8,
}


@pytest.mark.long
def test_an_object_is_continued_when_its_shard_is_lost(replicas: Replicas) -> None:
    """The shard is killed in the middle of outputs of all kinds."""
    client = Client(replicas.launched.url)
    asked = [{**sampling, **method} for sampling in SAMPLING.values() for method in METHODS.values()]
    alone = [ask(client, LIST, **sampling, **METHODS["off"]).text for sampling in SAMPLING.values()]
    lost = replicas.launched.shard(0)

    def kill() -> None:
        time.sleep(0.4)
        os.kill(lost, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    with ThreadPoolExecutor(len(asked)) as pool:
        found = list(pool.map(lambda parameters: ask(client, LIST, **parameters).text, asked))
    killer.join()
    assert found == [text for text in alone for _ in METHODS]
    for text in found:
        jsonschema.validate(json.loads(text), LIST)
    replicas.launched.wait_for("shard 0 was ended by SIGKILL")


class Score(pydantic.BaseModel):
    name: str
    score: int


def test_the_openai_client_parses_answers(replicas: Replicas) -> None:
    """Its own helpers, for whole answers and for streams, unmodified."""
    client = openai.OpenAI(base_url=f"{replicas.launched.url}/v1", api_key="secret sharing")
    messages: Any = [{"role": "user", "content": PROMPT}]
    asked: Any = {"model": "json", "messages": messages, "response_format": Score, "temperature": 0}
    whole = client.chat.completions.parse(**asked)
    assert whole.choices[0].message.parsed == Score(name="Wamiko", score=93)
    assert whole.choices[0].finish_reason == "stop"
    with client.chat.completions.stream(
        model="json", messages=messages, response_format=Score, temperature=0
    ) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.parsed == whole.choices[0].message.parsed


GRAMMARS: list[dict[str, Any]] = [
    {"response_format": {"type": "json_object", "schema": {**LIST, "minItems": 2, "maxItems": 2}}},
    {"guided_regex": "[a-z]{3,12} [0-9]{4}"},
    {"guided_choice": ["red", "green", "blue and yellow"]},
    {"guided_grammar": 'start: "(" start ")" | WORD\nWORD: /[a-z]{2,8}/'},
    {},
]
ADAPTERS: list[dict[str, Any]] = [{"adapter_id": name} for name in ("json", "sql", "cite")] + [{}]


@pytest.mark.long
def test_a_batch_of_sixteen_changes_no_text(replicas: Replicas) -> None:
    """With other grammars, adapters, draft sources and samplings in the same batch."""
    client = Client(replicas.launched.url)
    samplings, methods = list(SAMPLING.values()), list(METHODS.values())
    asked = [
        {**GRAMMARS[number % 5], **ADAPTERS[number % 4], **samplings[number // 8], "max_new_tokens": 60}
        for number in range(16)
    ]
    drafted = [{**each, **methods[1 + number % 3]} for number, each in enumerate(asked)]
    with ThreadPoolExecutor(16) as pool:
        found = [answer.text for answer in pool.map(lambda each: client.generate(PROMPT, **each), drafted)]
    assert found == [client.generate(PROMPT, **each, **METHODS["off"]).text for each in asked]


POINT: dict[str, Any] = {
    "response_format": {
        "type": "json_object",
        "schema": {
            "type": "object",
            "properties": {"name": {"type": "string", "maxLength": 8}, "score": {"type": "integer", "maximum": 999}},
            "required": ["name", "score"],
            "additionalProperties": False,
        },
    },
    "max_new_tokens": 80,
    "adapter_id": "json",
}
OPTIONS: list[dict[str, Any]] = [
    {"ignore_eos_token": True},
    {"do_sample": True, "seed": 3, "watermark": True},
    {"do_sample": True, "seed": 3, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.5},
    {"do_sample": True, "seed": 3, "top_k": 5, "top_p": 0.9, "min_p": 0.05, "typical_p": 0.95},
    {"do_sample": True, "best_of": 2},
]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(options, id=name, marks=() if name in ("penalties", "best_of") else pytest.mark.long)
        for options, name in zip(OPTIONS, ("ignore_eos", "watermark", "penalties", "filters", "best_of"), strict=True)
    ],
)
def test_options_of_sampling_keep_the_grammar(replicas: Replicas, options: dict[str, Any]) -> None:
    client = Client(replicas.launched.url)
    answers = [client.generate(PROMPT, **POINT, **options, **METHODS[name]) for name in ("off", "lookup")]
    assert answers[0].text == answers[1].text or "best_of" in options  # which takes no seed
    for answer in answers:
        assert answer.details["finish_reason"] == "eos_token"
        jsonschema.validate(json.loads(answer.text), POINT["response_format"]["schema"])


def test_a_stop_string_ends_an_output_early(replicas: Replicas) -> None:
    client = Client(replicas.launched.url)
    whole = client.generate(PROMPT, **POINT)
    ended = client.generate(PROMPT, **POINT, stop=["score"])
    assert ended.details["finish_reason"] == "stop_sequence"
    assert whole.text.startswith(ended.text) and len(ended.text) < len(whole.text)


def test_several_choices_each_follow_the_grammar(replicas: Replicas) -> None:
    asked: Any = {"model": "json", "prompt": PROMPT, "n": 4, "temperature": 1.2, "seed": 5, "max_tokens": 80}
    openai_client = openai.OpenAI(base_url=f"{replicas.launched.url}/v1", api_key="secret sharing")
    found = openai_client.completions.create(**asked, extra_body={"response_format": POINT["response_format"]})
    assert [choice.finish_reason for choice in found.choices] == ["stop"] * 4
    for choice in found.choices:
        jsonschema.validate(json.loads(choice.text), POINT["response_format"]["schema"])


def test_log_probabilities_are_those_of_the_constrained_distribution(replicas: Replicas) -> None:
    """A token without an alternative has probability one, also where the model would prefer another."""
    client = Client(replicas.launched.url)
    (only,) = [client.generate(PROMPT, guided_choice=["zebra crossing"], max_new_tokens=40, details=True)]
    assert only.text == "zebra crossing"
    assert all(abs(token["logprob"]) < 1e-4 for token in only.details["tokens"])
    two = client.generate(PROMPT, guided_choice=["A", "B"], max_new_tokens=4, details=True, top_n_tokens=3)
    likeliest = [each for each in two.details["top_tokens"][0] if each["logprob"] is not None]
    assert {each["text"] for each in likeliest} == {"A", "B"}
    assert abs(sum(math.exp(each["logprob"]) for each in likeliest) - 1) < 1e-4
