"""The `openai` package against the server: its requests are accepted, and it can parse the answers."""

import openai
import pytest

from tests.router.serving import MODEL_ID, Serving, serving

pytestmark = pytest.mark.anyio

MESSAGES = [{"role": "user", "content": "Hi"}]


def package(server: Serving) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


async def test_chat(server: Serving) -> None:
    server.says(" there!", ends=True)
    async with package(server) as client:
        answer = await client.chat.completions.create(
            model=MODEL_ID, messages=MESSAGES, n=2, logprobs=True, top_logprobs=3, seed=1, max_completion_tokens=8
        )
    assert [choice.message.content for choice in answer.choices] == [" there!", " there!"]
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].logprobs.content[0].bytes == list(b" there")
    assert answer.usage.completion_tokens == 6
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


async def test_chat_stream(server: Serving) -> None:
    server.says(" there!", ends=True)
    async with package(server) as client:
        stream = await client.chat.completions.create(
            model=MODEL_ID, messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == " there!"
    assert chunks[-1].usage.completion_tokens == 3


async def test_completions(server: Serving) -> None:
    server.says(" there!")
    async with package(server) as client:
        answer = await client.completions.create(model=MODEL_ID, prompt=["Hi", "Ho"], logprobs=2, echo=True, stop="!")
        stream = await client.completions.create(model=MODEL_ID, prompt=server.ids("Hi"), stream=True)
        text = "".join([chunk.choices[0].text async for chunk in stream])
    assert [choice.text for choice in answer.choices] == ["Hi there", "Ho there"]
    assert answer.choices[0].logprobs.text_offset == [0, 1, 2]
    assert text == " there!"


async def test_an_echo_lists_the_end_of_text(server: Serving) -> None:
    """lm-eval takes all entries but the last one as those of its text."""
    server.says("!", "", ends=True)
    async with package(server) as client:
        for num_tokens, last in ((2, ["!", "</s>"]), (1, ["</s>"])):
            answer = await client.completions.create(
                model=MODEL_ID, prompt="Hi", logprobs=1, echo=True, max_tokens=num_tokens
            )
            logprobs = answer.choices[0].logprobs
            assert logprobs.tokens == ["H", "i", *last]
            assert len(logprobs.token_logprobs) == len(logprobs.text_offset) == 2 + num_tokens
        plain = await client.completions.create(model=MODEL_ID, prompt="Hi", logprobs=1, max_tokens=1)
    assert plain.choices[0].logprobs.tokens == []


async def test_models(server: Serving) -> None:
    async with package(server) as client:
        listed = [model.id async for model in client.models.list()]
        assert listed == [MODEL_ID]
        assert (await client.models.retrieve(MODEL_ID)).id == MODEL_ID


async def test_errors(server: Serving) -> None:
    async with package(server) as client:
        with pytest.raises(openai.NotFoundError) as unknown:
            await client.chat.completions.create(model="other", messages=MESSAGES)
        assert unknown.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as wrong:
            await client.chat.completions.create(model=MODEL_ID, messages=MESSAGES, temperature=3)
        assert wrong.value.param == "temperature"
        server.says("ab", error="broken")
        with pytest.raises(openai.InternalServerError):
            await client.chat.completions.create(model=MODEL_ID, messages=MESSAGES)
        stream = await client.chat.completions.create(model=MODEL_ID, messages=MESSAGES, stream=True)
        with pytest.raises(openai.APIError, match="broken"):
            async for _ in stream:
                pass


async def test_overload_is_a_rate_limit(tmp_path_factory: pytest.TempPathFactory, anyio_backend: str) -> None:
    async with serving(tmp_path_factory.mktemp("full"), max_concurrent_requests=1) as server:
        server.says("ab", hangs=True)
        async with package(server) as client:
            stream = await client.chat.completions.create(model=MODEL_ID, messages=MESSAGES, stream=True)
            with pytest.raises(openai.RateLimitError) as refused:
                await client.chat.completions.create(model=MODEL_ID, messages=MESSAGES)
            assert int(refused.value.response.headers["retry-after"]) >= 1
            await stream.close()
        await server.idle()


async def test_a_prediction_and_our_own_fields(server: Serving) -> None:
    server.says(" there!", per_step=2, num_rejected=1)
    async with package(server) as client:
        answer = await client.chat.completions.create(
            model=MODEL_ID,
            messages=MESSAGES,
            max_tokens=2,
            prediction={"type": "content", "content": [{"type": "text", "text": "Hi there!"}]},
            extra_body={"speculative_tokens": 4, "speculative_method": "lookup"},
        )
        stream = await client.chat.completions.create(
            model=MODEL_ID,
            messages=MESSAGES,
            max_tokens=2,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"speculative_tokens": 4, "speculative_method": "lookup"},
        )
        last = [chunk async for chunk in stream][-1]
    submit = server.shard.submits[0]
    assert list(submit.prediction_ids) == server.ids("Hi there!")
    assert (submit.speculation.method, submit.speculation.num_tokens) == ("lookup", 4)
    for usage in (answer.usage, last.usage):
        details = usage.completion_tokens_details
        assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (1, 1)
        assert details.model_extra["speculation"]["method"] == "lookup"
