"""`/tokenize` in the forms of LoRAX and vLLM, `/detokenize`, `/tokenizer_info` and `/chat_tokenize`."""

from pathlib import Path
from typing import Any

import pytest

from tests.router.serving import CHAT_TEMPLATE, MODEL_ID, Serving, serving

pytestmark = pytest.mark.anyio
MESSAGES = [{"role": "user", "content": "Hi there"}]


async def post(server: Serving, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    response = await server.client.post(path, json=body)
    return response.status_code, response.json()


async def test_a_prompt_as_in_vllm(server: Serving) -> None:
    ids = server.ids("é there")
    status, answer = await post(server, "/tokenize", {"model": MODEL_ID, "prompt": "é there"})
    assert (status, answer) == (200, {"count": 3, "max_model_len": 2048, "tokens": ids, "token_strs": None})
    body = {"prompt": "é there", "return_token_strs": True, "add_special_tokens": False}
    assert (await post(server, "/tokenize", body))[1]["token_strs"] == ["Ã", "©", "Ġthere"]
    assert (await post(server, "/tokenize", {"prompt": ""}))[1]["tokens"] == []


async def test_messages_as_in_vllm(server: Serving) -> None:
    status, answer = await post(server, "/tokenize", {"model": MODEL_ID, "messages": MESSAGES})
    assert (status, answer["tokens"]) == (200, server.ids("[user]Hi there[assistant]"))
    continued = [*MESSAGES, {"role": "assistant", "content": "Yes"}]
    body = {"messages": continued, "continue_final_message": True}
    assert (await post(server, "/tokenize", body))[1]["tokens"] == server.ids("[user]Hi there[assistant]Yes")


async def test_tools_are_part_of_the_prompt(server: Serving) -> None:
    tool = {"type": "function", "function": {"name": "weather", "description": "The weather"}}
    status, answer = await post(server, "/tokenize", {"messages": MESSAGES, "tools": [tool]})
    assert status == 200
    text = server.backend.decode(answer["tokens"], skip_special_tokens=False)
    assert "weather" in text and "Hi there" in text


async def test_its_errors_have_openai_s_shape_where_the_body_is_vllm_s(server: Serving) -> None:
    status, answer = await post(server, "/tokenize", {"prompt": 3})
    assert (status, answer["error"]["param"]) == (400, "prompt")
    status, answer = await post(server, "/tokenize", {"prompt": "a", "messages": MESSAGES})
    assert (status, answer["error"]["message"]) == (400, "`prompt` and `messages` cannot both be set")
    status, answer = await post(server, "/tokenize", {"messages": [{"role": "critic", "content": "x"}]})
    assert (status, answer["error"]["message"]) == (400, "Failed applying chat template to inputs: no critics here")
    response = await server.client.post("/tokenize", json={"text": "a"})
    assert (response.status_code, response.text[-22:]) == (422, "inputs: Field required")
    status, answer = await post(server, "/tokenize", {"model": "other", "messages": MESSAGES})
    assert (status, answer["error"]["code"]) == (404, "model_not_found")


async def test_detokenize_reverses_tokenize(server: Serving) -> None:
    assert await post(server, "/detokenize", {"tokens": server.ids("é there")}) == (200, {"prompt": "é there"})
    assert (await post(server, "/detokenize", {"model": "any", "tokens": [0, 1]}))[1] == {"prompt": "<s></s>"}
    assert (await post(server, "/detokenize", {"tokens": []}))[1] == {"prompt": ""}


@pytest.mark.parametrize("tokens", [None, "a", [1.5], ["a"], [-1], [True], [300], [5] * ((1 << 17) + 1)])
async def test_what_is_not_token_ids_is_rejected(server: Serving, tokens: Any) -> None:
    status, answer = await post(server, "/detokenize", {"tokens": tokens})
    assert (status, answer["error"]["param"]) == (400, "tokens")


async def test_a_chat_as_in_tgi(server: Serving) -> None:
    status, answer = await post(server, "/chat_tokenize", {"model": "tgi", "messages": MESSAGES})
    assert (status, answer["error_type"]) == (404, "model_not_found")
    status, answer = await post(server, "/chat_tokenize", {"messages": MESSAGES, "max_tokens": 3})
    assert status == 200
    assert answer["templated_text"] == "[user]Hi there[assistant]"
    assert [token["id"] for token in answer["tokenize_response"]] == server.ids("[user]Hi there[assistant]")
    assert answer["tokenize_response"][0] == {"id": server.ids("[")[0], "text": "[", "start": 0, "stop": 1}


async def test_the_tokenizer_s_configuration(server: Serving) -> None:
    """What lm-eval's remote tokenizer reads."""
    information = (await server.client.get("/tokenizer_info")).json()
    assert information == {
        "tokenizer_class": None,
        "bos_token": "<s>",
        "eos_token": "</s>",
        "chat_template": CHAT_TEMPLATE,
    }


async def test_an_adapter_s_template_renders_its_chats(tmp_path: Path, anyio_backend: str) -> None:
    async with serving(tmp_path, adapters=True) as server:
        server.adapter("own", **{"chat_template.jinja": "<{{ messages[0].content }}>"})
        body = {"model": "own", "messages": MESSAGES}
        assert (await post(server, "/tokenize", body))[1]["tokens"] == server.ids("<Hi there>")
