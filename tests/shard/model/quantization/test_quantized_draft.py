"""A quantised draft model with a plain target: its drafts are accepted, and texts are unchanged."""

from dataclasses import replace
from pathlib import Path

import pytest

from lorikeet.proto.params import Method, Speculation
from lorikeet.shard.config import ShardConfig
from lorikeet.shard.grpc.streams import Commands, Inbox, Outbox, StreamOpened
from lorikeet.shard.model import load_model
from lorikeet.shard.requests.request import Request
from lorikeet.shard.startup.build import build_engine
from lorikeet.shard.startup.draft_model import load_draft_model
from tests.shard.engine.exactness import NEW_TOKENS, drive, prompts_of
from tests.shard.model.quantization.quantized_cases import LENGTHS, base, needs


@pytest.mark.parametrize("method", needs("bitsandbytes-nf4", "hqq-4bit", "fp8"))
def test_texts_are_the_plain_target_s(method: str, tmp_path: Path) -> None:
    folder = base("llama", tmp_path)
    prompts = prompts_of("llama", LENGTHS)
    plain = ShardConfig("m", str(folder), "unix:/dev/null", dtype="float32", max_total_tokens=128)
    expected = drive(load_model(plain), prompts, 64)
    config = replace(
        plain, draft_model=str(folder), draft_model_id="d", draft_dtype="float32", draft_quantize=method,
        speculation_max_batch_size=len(prompts),
    )  # fmt: skip
    model = load_model(config)
    draft = load_draft_model(config, model)
    assert draft is not None and (model.info.quantization, draft.info.quantization) == ("", method)
    inbox, outbox = Inbox(), Outbox()
    engine = build_engine(config, model, inbox, outbox, draft)
    outbox.open(1, wake=lambda: None)
    inbox.put(StreamOpened(1))
    requests = [
        Request((1, i), list(prompt), len(prompt), NEW_TOKENS, speculation=Speculation(Method.DRAFT, 3))
        for i, prompt in enumerate(prompts)
    ]
    inbox.put(Commands(1, submits=list(requests)))
    texts: dict[int, list[int]] = {i: [] for i in range(len(prompts))}
    num_accepted = 0
    while any(len(text) < NEW_TOKENS for text in texts.values()):
        engine.step()
        for output in outbox.take(1).request_outputs():
            texts[output.key[1]].extend(output.token_ids)
            num_accepted += output.num_accepted
    assert [texts[i] for i in range(len(prompts))] == [text.token_ids for text in expected]
    assert num_accepted >= 8  # a random model of this size is changed much by few bits
