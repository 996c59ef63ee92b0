"""Receipts of answers: their place, their content, and that a replay sends the same request."""

import hashlib
import json
import struct
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from lorikeet.adapters.errors import AdapterNotFound
from lorikeet.launcher.cli.replay import SavedReceipt, found_in
from lorikeet.proto import shard_pb2 as pb
from tests.router.api.routes.test_catalogue import made, write
from tests.router.api.routes.test_native import generate
from tests.router.api.routes.test_openai import BOTH, CHAT, COMPLETION
from tests.router.scripted_loader import digest_of, finds_all
from tests.router.scripted_shard import ScriptedShard
from tests.router.serving import MODEL_ID, Serving, serving

pytestmark = pytest.mark.anyio

NATIVE = ("/generate", "/", "/invocations")
DRAFTING = {"draft_model_id": "test/draft"}


@pytest.fixture(scope="module")
async def shared(anyio_backend: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Serving]:
    folder = tmp_path_factory.mktemp("receipts")
    made(folder, "one", "two")
    words = "do_sample: true, temperature: 0.3, top_k: 7, max_new_tokens: 4, stop: [zz], truncate: 1"
    path = write(folder, f"warm: {{id: one, parameters: {{{words}}}}}")
    async with serving(folder, adapters=True, catalogue_path=path, **DRAFTING) as started:
        yield started


def hash_of(ids: Sequence[int]) -> str:
    return hashlib.sha256(struct.pack(f"<{len(ids)}I", *ids)).hexdigest()


async def asked(server: Serving, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The receipt of a request that does not stream."""
    response = await server.client.post(path, json=body)
    assert response.status_code == 200, response.text
    answer = response.json()
    answer = answer[0] if isinstance(answer, list) else answer
    receipt: dict[str, Any] = answer.get("details", answer)["receipt"]
    return receipt


@pytest.mark.parametrize("path", NATIVE)
@pytest.mark.parametrize("details", [False, True])
async def test_an_answer_has_it_in_its_details(server: Serving, path: str, details: bool) -> None:
    server.says(" there!")
    body = {"inputs": "Hi", "parameters": {"max_new_tokens": 2, "details": details, "receipt": True}}
    response = await server.client.post(path, json=body, headers={"x-request-id": "mine"})
    answer = response.json() if path == "/generate" else response.json()[0]
    receipt = (answer["details"] if details else answer)["receipt"]
    assert ("details" in answer) == details
    assert receipt["request_id"] == "mine"
    assert receipt["prompt"] == {"num_tokens": 2, "sha256": hash_of(server.ids("Hi")), "token_ids": server.ids("Hi")}
    ids = server.ids(" there!")
    assert receipt["output"] == {"num_tokens": 2, "sha256": hash_of(ids), "finish_reason": "length", "token_ids": ids}


@pytest.mark.parametrize("details", [False, True])
async def test_a_stream_has_it_in_its_last_event(server: Serving, details: bool) -> None:
    server.says(" there!")
    parameters = {"max_new_tokens": 2, "details": details, "receipt": True}
    events = await server.events("/generate_stream", {"inputs": "Hi", "parameters": parameters})
    receipt = (events[-1]["details"] if details else events[-1])["receipt"]
    assert receipt["output"]["token_ids"] == server.ids(" there!")
    assert all("receipt" not in json.dumps(event) for event in events[:-1])


@pytest.mark.parametrize(("path", "body"), BOTH)
@pytest.mark.parametrize("with_usage", [False, True])
async def test_openai_answers_and_streams_have_it_next_to_the_choices(
    server: Serving, path: str, body: dict[str, Any], with_usage: bool
) -> None:
    server.says(" there!")
    request = {**body, "max_tokens": 2, "receipt": True}
    assert (await asked(server, path, request))["output"]["token_ids"] == server.ids(" there!")
    options = {"stream": True, "stream_options": {"include_usage": True}} if with_usage else {"stream": True}
    *before, last, done = await server.events(path, {**request, **options})
    assert done == "[DONE]" and last["choices"] == [] and ("usage" in last) == with_usage
    assert last["receipt"]["output"]["sha256"] == hash_of(server.ids(" there!"))
    assert all("receipt" not in event for event in before)


async def test_there_is_no_receipt_and_no_hashing_unless_asked(tmp_path: Path) -> None:
    async with serving(tmp_path) as server:
        server.says(" there!")
        assert "receipt" not in await generate(server, max_new_tokens=2, receipt=False)
        assert "receipt" not in (await server.client.post("/v1/completions", json=COMPLETION)).json()
        assert server.shard.num_digests == 0
        for _ in range(2):
            await generate(server, max_new_tokens=2, receipt=True)
        assert server.shard.num_digests == 1


async def test_it_holds_all_that_determines_the_text(server: Serving) -> None:
    server.says("ab", ends=True)
    parameters = {
        "adapter_id": "two", "do_sample": True, "temperature": 0.5, "top_k": 3, "top_p": 0.75, "min_p": 0.25,
        "typical_p": 0.5, "repetition_penalty": 1.5, "frequency_penalty": 0.25, "presence_penalty": -0.5, "seed": 2**63,
        "stop": ["x"], "max_new_tokens": 9, "watermark": True, "min_tokens": 2, "stop_token_ids": [9, 8],
        "allowed_token_ids": [41, 40], "bad_words": ["there"], "skip_special_tokens": False,
    }  # fmt: skip
    receipt = (await generate(server, receipt=True, **parameters))["receipt"]
    config = server.service.config
    assert receipt["base_digest"] == server.shard.base_digest
    assert receipt["tokenizer_digest"] == by_sha256sum(
        Path(config.model_path), "tokenizer.json", "tokenizer_config.json"
    )
    shown = {name: receipt[name] for name in ("model_id", "dtype", "device", "max_total_tokens", "receipt")}
    assert shown == {
        "model_id": MODEL_ID, "dtype": "float32", "device": "cuda", "max_total_tokens": 2048, "receipt": 1,
    }  # fmt: skip
    (call,) = [call for call in server.loader.asked if call["fetch"]["id"] == "two"]
    assert receipt["adapter"] == {"id": "two", "source": "local", "digest": digest_of(call)}
    assert receipt["parameters"] == {
        "seed": 2**63, "max_new_tokens": 9, "stop": ["x"], "ignore_eos": False, "do_sample": True, "temperature": 0.5,
        "top_k": 3, "top_p": 0.75, "min_p": 0.25, "typical_p": 0.5, "repetition_penalty": 1.5,
        "frequency_penalty": 0.25, "presence_penalty": -0.5, "logit_bias": [], "grammar": None,
        "watermark": {"gamma": 0.25, "delta": 2.0}, "min_tokens": 2, "stop_token_ids": [8, 9],
        "allowed_token_ids": [40, 41], "bad_words": ["there"], "skip_special_tokens": False,
    }  # fmt: skip
    assert receipt["output"]["finish_reason"] == "eos_token"


def by_sha256sum(folder: Path, *names: str) -> str:
    lines = [f"{hashlib.sha256((folder / name).read_bytes()).hexdigest()}  {name}\n" for name in names]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


CONSTRAINED = {
    "min_tokens": 2, "stop_token_ids": [9], "allowed_token_ids": [40, 41], "bad_words": ["there", "x y"],
    "skip_special_tokens": False, "ignore_eos": True, "include_stop_str_in_output": True,
}  # fmt: skip
MERGED = {"ids": ["one", "two"], "weights": [0.5, 0.25], "merge_strategy": "ties", "density": 0.5}
ASKED: list[tuple[str, dict[str, Any]]] = [
    ("/generate", {"inputs": "Hi", "parameters": {"max_new_tokens": 3}}),
    ("/generate", {"inputs": "Hi there", "parameters": {"max_new_tokens": 3, "truncate": 1, "ignore_eos_token": True}}),
    ("/generate", {"inputs": "Hi", "parameters": {"typical_p": 0.5, "max_new_tokens": 3, "watermark": True}}),
    ("/generate", {"inputs": "Hi", "parameters": {"temperature": 9.5, "seed": 2**64 - 1, "top_k": 2}}),
    ("/generate", {"inputs": "Hi", "parameters": {"adapter_id": "two", "stop": ["no", ""], "presence_penalty": 1.25}}),
    ("/generate", {"inputs": "Hi", "parameters": {"merged_adapters": MERGED, "top_p": 0.1}}),
    ("/generate", {"inputs": "Hi there", "parameters": {"adapter_id": "warm"}}),
    ("/generate", {"inputs": "Hi there", "parameters": {"adapter_id": "warm", "temperature": 0, "stop": []}}),
    ("/generate", {"inputs": [5, 9, 262], "parameters": {"max_new_tokens": 2}}),
    ("/v1/completions", {**COMPLETION, "temperature": 0, "max_tokens": 3}),
    ("/v1/completions", {**COMPLETION, "prompt": [7, 8], "seed": -3, "top_p": 0.0, "min_p": 0.5}),
    ("/v1/completions", {**COMPLETION, "logit_bias": {"5": 1.5, "6": -100}, "frequency_penalty": -2, "top_k": 4}),
    ("/v1/completions", {**COMPLETION, "model": "warm", "logit_bias": {"5": 1.5}, "temperature": 0, "typical_p": 0.5}),
    ("/v1/completions", {**COMPLETION, "model": "two", "stop": ["a", "b"], "ignore_eos_token": True}),
    ("/v1/completions", {**COMPLETION, "merged_adapters": MERGED, "logit_bias": {"5": 1.5}, "do_sample": False}),
    ("/v1/chat/completions", {**CHAT, "max_tokens": 3, "repetition_penalty": 1.5}),
    ("/v1/chat/completions", {**CHAT, "merged_adapters": MERGED, "continue_final_message": True}),
    ("/generate", {"inputs": "Hi there", "parameters": {**CONSTRAINED, "truncate": 2, "max_new_tokens": 3}}),
    ("/generate", {"inputs": "Hi there", "parameters": {"max_new_tokens": 3, "logit_bias": {"5": 1.5}}}),
    ("/v1/completions", {**COMPLETION, **CONSTRAINED, "truncate_prompt_tokens": 1}),
    ("/v1/chat/completions", {**CHAT, **CONSTRAINED, "max_tokens": 3}),
    ("/v1/chat/completions", {**CHAT, "max_tokens": 3, "response_format": {"type": "json_object"}}),
    ("/generate", {"inputs": "Hi", "parameters": {"guided_choice": ["a", "b"], "max_new_tokens": 5}}),
]  # fmt: skip


def determining(submit: pb.Submit) -> tuple[Any, ...]:
    """Everything in a Submit that determines the tokens."""
    sampling = submit.sampling.SerializeToString(deterministic=True)
    adapter = (submit.adapter.digest, submit.adapter.id, submit.adapter.source)
    assert submit.speculation.verify in ("", "shared-noise")
    grammar = submit.grammar.text
    stop_ids = list(submit.stop_ids)
    return (list(submit.prompt_ids), submit.max_new_tokens, submit.seed, sampling, stop_ids, adapter, grammar)


@pytest.mark.parametrize(("path", "body"), ASKED, ids=range(len(ASKED)))
async def test_a_replay_sends_the_same_request(server: Serving, path: str, body: dict[str, Any]) -> None:
    server.says("abcdef")
    request = {**body, "receipt": True}
    if path == "/generate":
        request = {**body, "parameters": {**body["parameters"], "receipt": True}}
    first = await asked(server, path, request)
    (read,) = found_in(json.dumps(first))
    again = await asked(server, *read.request())
    assert determining(server.shard.submits[0]) == determining(server.shard.submits[1])
    for receipt in (first, again):
        del receipt["output"]["finish_reason"]  # the two APIs name a stop string at the last token differently
    for name in ("parameters", "adapter", "prompt", "output", "base_digest", "tokenizer_digest"):
        assert first[name] == again[name]


@pytest.mark.parametrize(("path", "body"), [("/generate", {"inputs": "Hi there", "parameters": {}}), *BOTH])
async def test_a_prompt_given_separately_gives_the_same_request(
    server: Serving, path: str, body: dict[str, Any]
) -> None:
    server.says("ab")
    request = {**body, "receipt": True}
    if path == "/generate":
        request = {**body, "parameters": {"truncate": 1, "max_new_tokens": 2, "receipt": True}}
    first = await asked(server, path, request)
    prompt = body.get("inputs") or body.get("prompt") or body["messages"]
    del first["prompt"]["token_ids"]
    await asked(server, *SavedReceipt.read(first).request(prompt))
    assert determining(server.shard.submits[0]) == determining(server.shard.submits[1])


@pytest.mark.parametrize(
    ("own", "is_given"),
    [
        ({"speculative_verification": "rejection"}, False),
        ({"speculative_verification": "google", "do_sample": True, "temperature": 0.5}, False),
        ({"speculative_verification": "rejection", "seed": 4}, True),
        ({"speculative_verification": "rejection", "speculative_method": "lookup"}, True),
        ({"speculative_verification": "rejection", "speculative_tokens": 0}, True),
        ({"speculative_verification": "shared-noise"}, True),
        ({"speculative_verify": "coupled"}, True),
    ],
)
async def test_a_text_verified_by_rejection_has_none(server: Serving, own: dict[str, Any], is_given: bool) -> None:
    server.says("ab")
    own = {**own, "receipt": True}
    paths = [("/generate", {"inputs": "Hi", "parameters": own}), ("/", {"inputs": "Hi", "parameters": own})]
    for path, body in [*paths, *((path, {**body, **own}) for path, body in BOTH)]:
        if is_given:
            assert (await asked(server, path, body))["output"]["num_tokens"] > 0
            continue
        response = await server.client.post(path, json=body)
        assert response.status_code == 422 and "`receipt` needs a reproducible text" in response.text
    if not is_given:
        [event] = await server.events("/generate_stream", {"inputs": "Hi", "parameters": own})
        assert "`receipt` needs" in event["error"]
        assert server.shard.submits == []


@pytest.mark.parametrize(
    ("path", "body", "part"),
    [
        ("/generate", {"inputs": "Hi", "parameters": {"best_of": 2, "do_sample": True}}, "asks for 2"),
        ("/v1/completions", {**COMPLETION, "n": 3}, "asks for 3"),
        ("/v1/completions", {**COMPLETION, "best_of": 2}, "asks for 2"),
        ("/v1/completions", {**COMPLETION, "prompt": ["a", "b"]}, "asks for 2"),
        ("/v1/completions", {**COMPLETION, "max_tokens": 0, "echo": True, "logprobs": 0}, "`max_tokens` is 0"),
        ("/v1/chat/completions", {**CHAT, "n": 2}, "asks for 2"),
        ("/predict", {"prompt": "Hi"}, "`receipt` is not supported by this route"),
    ],
)
async def test_a_receipt_covers_exactly_one_text(server: Serving, path: str, body: dict[str, Any], part: str) -> None:
    request = {**body, "receipt": True}
    if path == "/generate":
        request = {**body, "parameters": {**body["parameters"], "receipt": True}}
    response = await server.client.post(path, json=request)
    assert response.status_code == 422 and part in response.text
    if path.startswith("/v1/"):
        assert response.json()["error"]["param"] == "receipt"
    assert server.shard.submits == []


@pytest.mark.parametrize("stream", [False, True])
async def test_without_the_digest_of_the_base_there_is_an_error(tmp_path: Path, stream: bool) -> None:
    async with serving(tmp_path) as server:
        server.shard.base_digest = ""
        server.says("ab")
        parameters = {"max_new_tokens": 2, "receipt": True}
        if stream:
            events = await server.events("/generate_stream", {"inputs": "Hi", "parameters": parameters})
            last = events[-1]
        else:
            response = await server.client.post("/generate", json={"inputs": "Hi", "parameters": parameters})
            assert response.status_code == 424
            last = response.json()
        assert "there is no receipt: the model's files have changed" in last["error"]
        assert (await generate(server, max_new_tokens=2))["generated_text"] == "ab"


async def test_shards_with_different_files_give_no_receipt(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    async with ScriptedShard(tmp_path / "other", lambda submit: pytest.fail("never asked")) as other:
        other.base_digest, other.credit_requests = "f" * 64, 0
        addresses = (f"unix:{tmp_path}/scripted.sock", other.address)
        async with serving(tmp_path, shard_addresses=addresses) as server:
            server.says("ab")
            await server.shard.until(lambda: all(link.client.connected for link in server.dispatcher.links))
            for link in server.dispatcher.links:
                await link.digest()
            response = await server.client.post(
                "/generate", json={"inputs": "Hi", "parameters": {"max_new_tokens": 2, "receipt": True}}
            )
            assert response.status_code == 424 and "the shards hold different files" in response.text


async def test_a_replay_with_a_missing_adapter_is_rejected(server: Serving) -> None:
    server.says("ab")
    first = await asked(
        server, "/generate", {"inputs": "Hi", "parameters": {"adapter_id": "one", "max_new_tokens": 2, "receipt": True}}
    )
    first["adapter"]["id"] = "absent"

    async def finds_nothing(call: dict[str, Any]) -> dict[str, Any]:
        raise AdapterNotFound("nowhere")

    server.loader.answer = finds_nothing
    try:
        path, body = SavedReceipt.read(first).request()
        assert (await server.client.post(path, json=body)).status_code == 404
    finally:
        server.loader.answer = finds_all


@pytest.mark.parametrize(
    ("inputs", "status", "part"),
    [
        ([5, 300], 422, "`inputs` has a token id that is not below 300"),
        ([], 422, "Input should be a valid string, or a list of token ids"),
        ([5, "a"], 422, "Input should be a valid string, or a list of token ids"),
        ([-1], 422, "Input should be a valid string, or a list of token ids"),
        ([True], 422, "Input should be a valid string, or a list of token ids"),
    ],
)
async def test_invalid_token_ids(server: Serving, inputs: list[Any], status: int, part: str) -> None:
    response = await server.client.post("/generate", json={"inputs": inputs, "parameters": {"max_new_tokens": 2}})
    assert response.status_code == status and part in response.text


async def test_token_ids_are_a_prompt_without_text(server: Serving) -> None:
    server.says("ab")
    response = await server.client.post("/generate", json={"inputs": [5, 6, 7], "parameters": {"max_new_tokens": 2}})
    assert response.headers["x-prompt-tokens"] == "3"
    assert list(server.shard.submits[0].prompt_ids) == [5, 6, 7]
    parameters = {"max_new_tokens": 2, "return_full_text": True}
    response = await server.client.post("/generate", json={"inputs": [5, 6, 7], "parameters": parameters})
    assert response.status_code == 422 and "`return_full_text` needs `inputs` as a text" in response.text
