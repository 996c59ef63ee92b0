"""A real draft model with a real target, built as the shard builds them: no text changes, and a target
that drafts for itself is never wrong.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lorikeet.proto.params import Method, SamplingParams, Speculation, Verification
from lorikeet.shard.config import ShardConfig
from lorikeet.shard.grpc.streams import Commands, Inbox, Outbox, Output, StreamOpened
from lorikeet.shard.model import load_model
from lorikeet.shard.requests.request import Request, Source
from lorikeet.shard.startup.build import build_engine
from lorikeet.shard.startup.draft_model import load_draft_model
from tests import tiny

SAMPLED = SamplingParams(do_sample=True, temperature=0.9, top_p=0.95, repetition_penalty=1.1, presence_penalty=0.2)
NEW_TOKENS = 24


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ShardConfig:
    folder = tiny.make("llama", tmp_path_factory.mktemp("target"), tokenizer=True)
    return ShardConfig("target", str(folder), "unix:/dev/null", max_total_tokens=128, num_pages=80)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("draft")
    return str(tiny.make("llama", folder, seed=3, tokenizer=True, num_hidden_layers=1))


def run(config: ShardConfig, width: int, rule: Verification = Verification.SHARED_NOISE) -> dict[int, Output]:
    """Eight requests at once, greedy and sampled."""
    inbox, outbox = Inbox(), Outbox()
    model = load_model(config)
    engine = build_engine(config, model, inbox, outbox, load_draft_model(config, model))
    engine.warm_up()
    outbox.open(1, wake=lambda: None)
    inbox.put(StreamOpened(1))
    random = torch.Generator().manual_seed(4)
    requests = []
    for i in range(8):
        prompt = torch.randint(0, model.info.vocab_size, (3 + 9 * i,), generator=random).tolist()
        request = Request((1, i), prompt, len(prompt), NEW_TOKENS)
        if i % 2:
            request.sampling = replace(SAMPLED, seed=i)
        if i in (2, 5):
            words = tuple((first, last) for first in range(60) for last in range(first % 3, 60, 3))
            request.sampling = replace(request.sampling, bad_words=words, allowed_ids=tuple(range(60)))
            request.sampling = replace(request.sampling, min_tokens=9, min_tokens_stop_ids=(4, 5))
        if width:
            request.speculation = Speculation(Method.DRAFT, width + i % 3, verify=rule)
        requests.append(request)
    inbox.put(Commands(1, submits=list(requests)))
    found: dict[int, Output] = {}
    while True:
        engine.step()
        for output in outbox.take(1).request_outputs():
            assert not output.error
            found.setdefault(output.key[1], output)
            if found[output.key[1]] is not output:
                found[output.key[1]].merge(output)
        if engine.scheduler.is_idle:
            engine.scheduler.check()
            return found


@pytest.mark.parametrize("lag", [pytest.param(0, marks=pytest.mark.long), 1])
def test_texts_do_not_depend_on_a_draft_model(config: ShardConfig, small: str, lag: int) -> None:
    config = replace(config, commit_lag=lag)
    plain = run(config, 0)
    drafted = run(replace(config, draft_model=small, draft_model_id="small"), 4)
    for i, output in plain.items():
        assert drafted[i].token_ids == output.token_ids
        assert sum(drafted[i].num_drafted) > 0
        assert drafted[i].sources[0] == Source.PREFILL


@pytest.mark.parametrize("rule", Verification)
def test_a_target_that_drafts_for_itself_is_never_wrong(config: ShardConfig, rule: Verification) -> None:
    itself = replace(config, draft_model=config.model_path, draft_model_id="itself")
    for output in run(itself, 3, rule).values():
        assert output.num_accepted == sum(output.num_drafted) > 0


def test_a_draft_model_takes_its_part_of_the_memory(config: ShardConfig, small: str) -> None:
    config = replace(config, num_pages=None, draft_model=small, draft_model_id="small")
    model = load_model(config)
    draft = load_draft_model(config, model)
    assert draft is not None
    memory = 20 * (model.page_bytes + draft.page_bytes)
    engine = build_engine(replace(config, cpu_memory=memory), model, Inbox(), Outbox(), draft)
    assert engine.scheduler.cache.num_pages == 20


def test_another_tokenizer_is_rejected_with_an_error(config: ShardConfig, small: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0, "b": 1}}}))
    other = replace(config, draft_model=str(tmp_path), draft_model_id="unrelated")
    with pytest.raises(ValueError, match="unrelated has another tokenizer than target"):
        load_draft_model(other, load_model(config))
