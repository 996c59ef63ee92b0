"""Fields that decide how a chat becomes a prompt, with the model's template, an adapter's, and the request's own."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.router.api.routes.test_openai import CHAT
from tests.router.serving import MODEL_ID, Serving, serving

pytestmark = pytest.mark.anyio

PATH = "/v1/chat/completions"
TEMPLATE = (
    "{% for document in documents or [] %}({{ document.text }}){% endfor %}"
    "{% for message in messages %}[{{ message.role }}]{{ message.content }};{% endfor %}"
    "{% if reasoning_effort is defined %}<{{ reasoning_effort }}>{% endif %}"
    "{% if not thinking | default(true) %}-{% endif %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture(scope="module")
async def shared(anyio_backend: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Serving]:
    """The adapter `full` has a template that reads everything."""
    folder = tmp_path_factory.mktemp("serving")
    async with serving(folder, adapters=True, trust_request_chat_template=True) as started:
        started.adapter("full", **{"chat_template.jinja": TEMPLATE})
        yield started


async def prompt(server: Serving, model: str = "full", **fields: Any) -> str:
    """The prompt of one chat, as the shard gets it."""
    server.says("x")
    response = await server.client.post(PATH, json={**CHAT, "model": model, "max_tokens": 1, **fields})
    assert response.status_code == 200, response.text
    assert "x-ignored-fields" not in response.headers
    return str(server.backend.decode(list(server.shard.submits[-1].prompt_ids), skip_special_tokens=False))


async def test_variables_of_the_template(server: Serving) -> None:
    assert await prompt(server) == "[user]Hi;[assistant]"
    assert await prompt(server, chat_template_kwargs={"thinking": False}) == "[user]Hi;-[assistant]"
    assert await prompt(server, reasoning_effort="low") == "[user]Hi;<low>[assistant]"
    assert await prompt(server, documents=[{"text": "A"}, {"text": "B"}]) == "(A)(B)[user]Hi;[assistant]"


async def test_the_end_of_the_prompt(server: Serving) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "It is "}]
    assert await prompt(server, add_generation_prompt=False) == "[user]Hi;"
    for model, expected in (("full", "[user]Hi;[assistant]It is "), (MODEL_ID, "[user]Hi[assistant]It is ")):
        assert await prompt(server, model, messages=messages, continue_final_message=True) == expected


async def test_a_template_of_the_request(server: Serving) -> None:
    template = "{{ messages[0].content }}|{{ extra }}|{{ eos_token }}"
    assert await prompt(server, MODEL_ID, chat_template=template, chat_template_kwargs={"extra": 5}) == "Hi|5|</s>"
    for broken in ("{% if %}", "{{ messages[0].content.a.b }}"):
        response = await server.client.post(PATH, json={**CHAT, "chat_template": broken})
        assert response.status_code == 400, response.text
        assert response.json()["error"]["message"].startswith("Failed applying chat template to inputs: ")


@pytest.mark.parametrize(("field", "value"), [("documents", [{"text": "A"}]), ("add_generation_prompt", False)])
async def test_fields_that_the_template_does_not_read_are_rejected(server: Serving, field: str, value: Any) -> None:
    response = await server.client.post(PATH, json={**CHAT, field: value})
    assert response.status_code == 422
    error = response.json()["error"]
    assert (error["param"], error["code"]) == (field, "unsupported_parameter")
    assert "is not read by the chat template" in error["message"]


async def test_documents_that_cannot_fit_are_rejected_before_they_are_rendered(server: Serving) -> None:
    for documents in ([{"text": "a" * 8_000_000}], [{"text": [["a"] * 100_000]}]):
        fields = {"model": "full", "documents": documents}
        response = await server.client.post(PATH, json={**CHAT, **fields})
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (400, "context_length_exceeded"), response.text
        assert error["param"] == "documents"
        assert "x-ignored-fields" not in response.headers


async def test_names_that_break_a_call_are_harmless(server: Serving) -> None:
    server.says("x")
    for name in ("self", "raise_exception", "loop", "a b", "{{", ""):
        response = await server.client.post(PATH, json={**CHAT, "chat_template_kwargs": {name: 1}})
        assert response.status_code in (200, 400), response.text
