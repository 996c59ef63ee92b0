"""Drafts that the device makes and accepts change no text, over a model that detects every wrong page and position."""

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest

from lorikeet.proto.params import LogprobParams, Method, SamplingParams, Schedule, Speculation
from lorikeet.shard.grpc.streams import Output
from lorikeet.shard.requests.request import Request, ScheduledRequest
from lorikeet.shard.scheduler.decoding import DecodeStep, DecodingRequests
from tests.shard.engine.test_heads_step import FIVE, PLAIN, TWO, make_rig
from tests.shard.engine.test_speculation import assert_accounts, assert_equal, texts_alone
from tests.shard.fake_model import VOCAB_SIZE
from tests.shard.rig import SCORED, Rig, Setup, make_request
from tests.shard.speculation.scripted_drafts import ScriptedDrafts, script_device

SETUPS = {
    "default": Setup(commit_lag=1, drafts_on_device=True),
    "few pages, chunks of 7": Setup(26, commit_lag=1, step_tokens=7, drafts_on_device=True),
    "pages of one token": Setup(page_size=1, commit_lag=1, drafts_on_device=True),
    "two at a time": Setup(max_running=2, commit_lag=1, drafts_on_device=True),
}
SAMPLED = SamplingParams(do_sample=True, temperature=0.9, top_k=20, top_p=0.95, seed=3)
DISTRIBUTIONS: tuple[dict[str, object], ...] = (
    {},
    {"sampling": SAMPLED},
    {"sampling": replace(SAMPLED, logit_bias=((5, 1.0),), min_tokens=9, min_tokens_stop_ids=(7,))},
    {"sampling": SAMPLED, "logprobs": LogprobParams(wanted=True, alternatives=3)},
    {"logprobs": SCORED},
    {"logprobs": LogprobParams(alternatives=21)},  # which is planned by itself, not as a row of arrays
)
SCHEDULES = (Schedule.CONSTANT, Schedule.HEURISTIC, Schedule.AUTO)


def make_mix(method: Method = Method.LOOKUP, has_penalties: bool = False) -> list[Request]:
    """Eighteen requests: shared beginnings, lengths from 1 to 40, widths from 1 to 10, all schedules."""
    rng = random.Random(6)
    stems = [[rng.randrange(VOCAB_SIZE) for _ in range(30)] for _ in range(3)]
    requests = []
    for i in range(18):
        prompt = stems[i % 3][: rng.randrange(31)] + [rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(1, 10))]
        width = 0 if method is Method.MEDUSA else (1, 3, 5, 10)[i % 4]
        kind = Speculation(method, width, 0 if method is Method.LOOKUP else 4, SCHEDULES[i // 3 % 3])
        values = {"stop_ids": frozenset({7}), "speculation": kind, **DISTRIBUTIONS[i % len(DISTRIBUTIONS)]}
        if has_penalties and i == 17:  # the host makes its drafts
            values["sampling"] = replace(SAMPLED, repetition_penalty=1.2)
        requests.append(make_request(i, prompt, rng.randrange(1, 40), **values))
    return requests


def run(rig: Rig, requests: list[Request], monkeypatch: pytest.MonkeyPatch) -> tuple[dict[int, Output], int]:
    """The outputs, and how many parts of steps were launched before the drafts of the step before were verified."""
    num_uncertain = 0
    settle, plan, assert_kv_is_true = ScheduledRequest.settle, DecodingRequests.launch, rig.assert_kv_is_true

    def counted(item: ScheduledRequest, num_accepted: int) -> None:
        nonlocal num_uncertain
        num_uncertain += 1
        settle(item, num_accepted)

    def check() -> None:
        assert_kv_is_true()
        for request in rig.scheduler.running:  # all tokens but the newest are in pages that others may share
            if request.is_decoding:  # its counts are those of the arrays
                assert rig.scheduler.decoding._lengths[request.row] == len(request.token_ids)
            else:
                assert request.is_fresh or request.num_committed == len(request.token_ids) - 1

    def planned(decoding: DecodingRequests) -> DecodeStep | None:
        nonlocal num_uncertain
        step = plan(decoding)
        num_uncertain += 0 if step is None else int((step.num_uncertain > 0).sum())
        return step

    monkeypatch.setattr(DecodingRequests, "launch", planned)
    monkeypatch.setattr(ScheduledRequest, "settle", counted)
    monkeypatch.setattr(rig, "assert_kv_is_true", check)
    rig.watches_kv = True
    return rig.run(*requests), num_uncertain


def cases(*values: tuple[object, ...], sample: set[tuple[object, ...]]) -> list[Any]:
    """All combinations; those outside the sample are long."""
    return [
        pytest.param(*case, marks=() if case in sample else pytest.mark.long) for case in itertools.product(*values)
    ]


@pytest.mark.parametrize(
    ("name", "chance", "has_penalties"),
    cases(
        tuple(SETUPS), (0.0, 0.7, 1.0), (False, True),
        sample={("default", 0.7, False), ("few pages, chunks of 7", 1.0, False), ("pages of one token", 0.7, True)},
    ),
)  # fmt: skip
def test_every_text_is_what_it_is_without(
    name: str, chance: float, has_penalties: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = make_mix(has_penalties=has_penalties)
    alone = texts_alone(requests)
    texts = {r.key[1]: r.token_ids + alone[r.key[1]].token_ids for r in requests}
    rig = Rig(replace(SETUPS[name], drafts=ScriptedDrafts(texts=texts, chance=chance)))
    script_device(rig, texts, chance, finds_fewer=True)
    outputs, num_uncertain = run(rig, requests, monkeypatch)
    for request in requests:
        assert_equal(outputs[request.key[1]], alone[request.key[1]])
        assert_accounts(outputs[request.key[1]])
    assert num_uncertain > 30 or has_penalties


@pytest.mark.parametrize(
    ("name", "method"),
    cases(
        tuple(SETUPS), (Method.LOOKUP, Method.MEDUSA, Method.AUTO),
        sample={("default", Method.AUTO), ("few pages, chunks of 7", Method.MEDUSA), ("two at a time", Method.LOOKUP)},
    ),
)  # fmt: skip
def test_prompt_lookup_and_heads_change_no_text(name: str, method: Method, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = texts_alone(make_mix(method))
    requests = make_mix(method)
    for i, request in enumerate(requests):
        if method is not Method.LOOKUP:
            request.adapter_digest, request.heads_digest = ((TWO, ""), (PLAIN, FIVE), ("", TWO))[i % 3]
    rig = make_rig(SETUPS[name])
    outputs, num_uncertain = run(rig, requests, monkeypatch)
    for request in requests:
        assert_equal(outputs[request.key[1]], alone[request.key[1]])
    assert sum(sum(output.num_drafted) for output in outputs.values()) > 20
    assert num_uncertain > 30
