"""Requests drawn from the published schema: every answer has a status and a media type that the document lists."""

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from huggingface_hub import constants
from hypothesis import HealthCheck, given, settings
from starlette.routing import Route

from lorikeet.adapters.keys import sha256
from lorikeet.proto import shard_pb2
from lorikeet.router.api import openapi
from lorikeet.router.error_answers import ANSWERS
from lorikeet.router.errors import UnknownMethod, UnknownRoute
from tests.hub_server import hub
from tests.router.serving import MODEL_ID, Serving
from tests.router.threaded_serving import ThreadedServing

ADMIN_KEY = "schema admin key"
KNOWN = "known"
"""An adapter that exists."""
SAMPLE = 2
"""Cases per operation in `make test`."""
ALL_CASES = 20_000
ENDLESS = ("/v1/live",)
"""Streams that go on until the client leaves."""


class Server(ThreadedServing):
    """The drawn requests are sent from the test's own thread."""

    def begin(self) -> None:
        self.serving.says("abc", ends=True)
        self.serving.adapter(KNOWN)
        self.app = self.serving.server.config.app

    async def run(self) -> None:
        num_read = 0
        while not self.ended.is_set():
            await asyncio.sleep(0.01)
            num_read = confirm_unloads(self.serving, num_read)


def confirm_unloads(server: Serving, num_read: int) -> int:
    """Report adapters as gone that a command unloads; returns the number of commands that were read."""
    commands = server.shard.commands
    for command in commands[num_read:]:
        absent = shard_pb2.AdapterState.ABSENT
        server.shard.tell(
            *(shard_pb2.AdapterState(digest=digest, residency=absent) for digest in command.unload_digests)
        )
    return len(commands)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Its hub has no adapters: drawn names are unknown, rather than unreachable."""
    folder = tmp_path_factory.mktemp("openapi")
    with hub({}) as source, pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "ENDPOINT", source.url)
        with Server(folder, adapters=True, admin_key_sha256=sha256(ADMIN_KEY)) as running:
            yield running


def no_server_error(context: Any, response: Any, case: Any) -> None:
    """501 is the documented answer of routes that are not supported."""
    assert response.status_code < 500 or response.status_code == 501, f"{response.status_code}: {response.text[:500]}"


SETTINGS = settings(derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))


def use_known_names(body: Any) -> None:
    """Drawn names do not exist: replace them, so that requests get past the choice of the model."""
    for fields in (body, body.get("parameters") if isinstance(body, dict) else None):
        if isinstance(fields, dict):
            known = {"model": MODEL_ID, "adapter_id": KNOWN, "lora_path": KNOWN, "lora_name": KNOWN}
            fields.update({name: known[name] for name in known.keys() & fields.keys()})
            fields.pop("adapter_source", None)


def check(url: str, num_cases: int, *, in_turns: bool = False) -> Counter[int]:
    """Draw `num_cases` for each operation and mode; returns the number of answers by status.

    `in_turns`: the modes take turns, so that an operation has one of them.
    """
    # here, since only the worker that runs these tests needs it
    schemathesis = pytest.importorskip("schemathesis", reason="needs schemathesis from PyPI")
    conformance = pytest.importorskip("schemathesis.specs.openapi.checks")
    checks = [no_server_error, conformance.status_code_conformance, conformance.content_type_conformance]
    every_mode = schemathesis.generation.GenerationMode
    schema = schemathesis.openapi.from_dict(httpx.get(f"{url}/openapi.json").json())
    answers: Counter[int] = Counter()
    headers = {"authorization": f"Bearer {ADMIN_KEY}"}
    operations = [operation.ok() for operation in schema.get_all_operations()]
    assert {operation.label for operation in operations} == {
        f"{operation.method.upper()} {operation.path}" for operation in openapi.OPERATIONS
    }
    for number, operation in enumerate(operations):
        if operation.path in ENDLESS:
            continue
        modes = list(every_mode) if operation.body else [every_mode.POSITIVE]
        for mode in [modes[number % len(modes)]] if in_turns else modes:

            @settings(SETTINGS, max_examples=num_cases)
            @given(case=operation.as_strategy(generation_mode=mode))
            def send(case: Any) -> None:
                if sum(answers.values()) % 2:
                    use_known_names(case.body)
                response = case.call(base_url=url, headers=headers, timeout=60)
                answers[response.status_code] += 1
                case.validate_response(response, checks=checks, headers=headers)

            send()
    return answers


def test_a_sample_of_drawn_requests_gets_documented_answers(server: Server) -> None:
    answers = check(server.url, SAMPLE, in_turns=True)
    assert answers[200] > 0 and answers[422] > 0


@pytest.mark.long
def test_all_drawn_requests_get_documented_answers(server: Server) -> None:
    num_drawn = 2 * sum(operation.request is not None for operation in openapi.OPERATIONS)
    answers = check(server.url, ALL_CASES // num_drawn + 1)
    assert sum(answers.values()) >= ALL_CASES


def test_the_document_lists_every_route(server: Server) -> None:
    listed = {(operation.method.upper(), operation.path) for operation in openapi.OPERATIONS}
    routes = [route for route in server.app.routes if isinstance(route, Route)]
    served = {(method, route.path.replace(":any}", "}")) for route in routes for method in route.methods or ()}
    assert {operation for operation in served if operation[0] != "HEAD"} == listed


def test_every_error_is_documented_somewhere() -> None:
    listed = {leaf for operation in openapi.OPERATIONS for leaf in operation.kind.value}
    assert ANSWERS.keys() - listed == {UnknownMethod, UnknownRoute}


def test_the_document_names_the_ways_to_authenticate() -> None:
    document = json.loads(json.dumps(openapi.document()))
    schemes = document["components"]["securitySchemes"]
    for operations in document["paths"].values():
        for operation in operations.values():
            assert all(scheme.keys() <= schemes.keys() for scheme in operation["security"])
