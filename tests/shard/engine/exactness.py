"""Greedy tokens of concurrent requests against transformers, one architecture at a time, on tiny random models.

The oracle is `transformers.generate` on a second load of the checkpoint and shares no code with shard/.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from lorikeet.shard.batch.segments import Segment
from lorikeet.shard.config import ShardConfig
from lorikeet.shard.grpc.streams import Commands, Inbox, Outbox, Refusal, StreamOpened
from lorikeet.shard.model import Model, load_model
from lorikeet.shard.requests.request import Request
from lorikeet.shard.startup.build import build_engine
from tests import tiny

NEW_TOKENS = 24
MIN_DISTINCT = 12
"""Distinct tokens that every text of the oracle must have: text that repeats itself proves nothing."""
MOST_SEEDS = 40
TIE = 1e-4
"""Distance of the oracle's two best logits below which either may be the higher one."""


@dataclass
class Tried:
    """What one architecture gave."""

    name: str
    num_requests: int = 0
    num_tokens: int = 0
    num_ties: int = 0
    """Requests whose first difference is a tie of the oracle."""
    num_distinct: int = 0
    """Fewest distinct tokens in a text; below 12 the case could not fail."""
    worst_logprob: float = 0.0
    differences: list[str] = field(default_factory=list)

    @property
    def exact(self) -> bool:
        return not self.differences and self.worst_logprob < 1e-4


@dataclass(frozen=True)
class Continued:
    """A continuation: tokens, and [tokens, V] log probabilities of each step."""

    token_ids: list[int]
    logprobs: torch.Tensor


def prompts_of(name: str, lengths: tuple[int, ...]) -> list[list[int]]:
    """Random prompts of the given lengths."""
    generator = torch.Generator().manual_seed(sum(name.encode()))
    return [torch.randint(0, tiny.VOCAB, (length,), generator=generator).tolist() for length in lengths]


def oracle(folder: Path, prompts: list[list[int]], max_total_tokens: int) -> list[Continued]:
    """transformers' own greedy text, each prompt alone."""
    config = AutoConfig.from_pretrained(folder)
    fix_factors(config, max_total_tokens)
    # falcon's eager attention adds its alibi twice; what transformers runs by default does not
    attention = "sdpa" if config.model_type == "falcon" else "eager"
    model = AutoModelForCausalLM.from_pretrained(folder, config=config, attn_implementation=attention).eval()
    # where its length reaches the other factors, transformers 5.17 drops Phi-3's cache and goes on from one token alone
    rope = getattr(config, "rope_parameters", None) or {}
    has_cache = rope.get("rope_type") != "longrope"
    texts = []
    for prompt in prompts:
        output: Any = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), do_sample=False,
            max_new_tokens=NEW_TOKENS, return_dict_in_generate=True, output_logits=True,
            use_cache=has_cache,
        )  # fmt: skip
        logits = torch.stack(output.logits, 1)[0].float()
        texts.append(Continued(output.sequences[0, len(prompt) :].tolist(), logits.log_softmax(-1)))
    return texts


def make_lively(name: str, folder: Path, prompts: list[list[int]], max_total_tokens: int) -> list[Continued]:
    """Make the case under its own seed, or the next ones, until no oracle text falls into a loop; give those texts."""
    own = tiny.SEEDS.get(name, 0)
    for seed in range(own, own + MOST_SEEDS):
        tiny.make(name, folder, seed=seed)
        for part in (prompts[:1], prompts):  # most loops show in the first text
            texts = oracle(folder, part, max_total_tokens)
            if min(len(set(text.token_ids)) for text in texts) < MIN_DISTINCT:
                break
        else:
            return texts
    raise RuntimeError(f"{name}: under no seed from {own} on do all texts have {MIN_DISTINCT} distinct tokens")


def fix_factors(config: Any, max_total_tokens: int) -> None:
    """longrope: leave only the factors that a server with this limit uses."""
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        chosen = "long_factor" if max_total_tokens > rope["original_max_position_embeddings"] else "short_factor"
        rope["short_factor"] = rope["long_factor"] = rope[chosen]


@dataclass
class Driven:
    """One request of the small driver below."""

    token_ids: list[int]
    num_prompt: int
    page_ids: list[int]
    num_computed: int = 0
    logprobs: list[torch.Tensor] = field(default_factory=list)


def drive(model: Model, prompts: list[list[int]], step_tokens: int) -> list[Continued]:
    """All prompts at once: every step takes each running request's next token and `step_tokens` of prompts."""
    pages_each = -(-(max(map(len, prompts)) + NEW_TOKENS) // model.page_size)
    order = torch.randperm(len(prompts) * pages_each, generator=torch.Generator().manual_seed(1)).tolist()
    model.allocate_kv(len(order))
    requests = [
        Driven(list(prompt), len(prompt), order[i * pages_each : (i + 1) * pages_each])
        for i, prompt in enumerate(prompts)
    ]
    while any(len(request.logprobs) < NEW_TOKENS for request in requests):
        budget, plan = step_tokens, []
        for request in requests:
            missing = len(request.token_ids) - request.num_computed
            if len(request.logprobs) < NEW_TOKENS:
                count = missing if request.logprobs else min(missing, budget)
                budget -= 0 if request.logprobs else count
                plan += [(request, count)] if count else []
        _step(model, plan)
    return [Continued(r.token_ids[r.num_prompt :], torch.stack(r.logprobs)) for r in requests]


def _step(model: Model, plan: list[tuple[Driven, int]]) -> None:
    """One forward of the driver; samples where a request has caught up with its known tokens."""
    segments = [Segment(request.num_computed, count, request.page_ids) for request, count in plan]
    ids = [i for request, count in plan for i in request.token_ids[request.num_computed : request.num_computed + count]]
    rows = torch.tensor([count for _, count in plan]).cumsum(0) - 1
    device = model.info.device
    model.inputs.fill(segments, torch.tensor(ids).to(device), rows.to(device), rows.tolist())
    logprobs = model.forward().log_softmax(-1).cpu()
    for (request, count), row in zip(plan, logprobs, strict=True):
        request.num_computed += count
        if request.num_computed == len(request.token_ids):
            request.token_ids.append(int(row.argmax()))
            request.logprobs.append(row)


def compare(name: str, expected: list[Continued], given: list[Continued], tie: float = TIE) -> Tried:
    """Equal tokens up to ties, and equal log probabilities up to the first difference."""
    tried = Tried(name, num_requests=len(expected))
    tried.num_distinct = min(len(set(text.token_ids)) for text in expected)
    for index, (want, got) in enumerate(zip(expected, given, strict=True)):
        pairs = zip(want.token_ids, got.token_ids, strict=True)
        same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(want.token_ids))
        tried.num_tokens += same
        compared = min(same + 1, len(want.token_ids))
        tried.worst_logprob = max(
            tried.worst_logprob, float((want.logprobs[:compared] - got.logprobs[:compared]).abs().max())
        )
        if same < len(want.token_ids):
            best = want.logprobs[same].topk(2).values
            if best[0] - best[1] < tie:
                tried.num_ties += 1
            else:
                tried.differences.append(f"request {index} differs at token {same}")
    return tried


@dataclass
class Run:
    """What the engine gave."""

    texts: list[list[int]]
    num_preempted: int
    num_cached: int
    """Prompt tokens found in the prefix cache."""


def through_engine(config: ShardConfig, prompts: list[list[int]], rounds: int = 1, num_new: int = NEW_TOKENS) -> Run:
    """Greedy texts of `num_new` tokens of all prompts at once through scheduler, pages and sampling; `rounds` times one
    after the other.
    """
    inbox, outbox = Inbox(), Outbox()
    engine = build_engine(config, load_model(config), inbox, outbox)
    outbox.open(1, wake=lambda: None)
    inbox.put(StreamOpened(1))
    texts: dict[int, list[int]] = {}
    num_cached = 0
    for number in range(rounds):
        ids = [number * len(prompts) + index for index in range(len(prompts))]
        requests: list[Request | Refusal] = [
            Request((1, i), list(prompt), len(prompt), num_new) for i, prompt in zip(ids, prompts, strict=True)
        ]
        inbox.put(Commands(1, submits=requests))
        ended = 0
        while ended < len(prompts):
            engine.step()
            for output in outbox.take(1).request_outputs():
                texts.setdefault(output.key[1], []).extend(output.token_ids)
                num_cached += output.num_cached
                ended += bool(output.finish_reason)
                if output.error:
                    raise RuntimeError(output.error)
    engine.scheduler.check()
    return Run([texts[i] for i in sorted(texts)], engine.scheduler.num_preempted, num_cached)


def check(
    name: str, folder: Path, *, step_tokens: int = 64, attention: str = "auto", max_total_tokens: int = 128,
    lengths: tuple[int, ...] = tiny.LENGTHS, device: str = "cpu", tie: float = TIE,
) -> Tried:  # fmt: skip
    """Make, load, run and compare one architecture at model level."""
    prompts = prompts_of(name, lengths)
    expected = make_lively(name, folder, prompts, max_total_tokens)
    config = ShardConfig(
        name, str(folder), "unix:/dev/null", device=device, dtype="float32", attention=attention,
        max_total_tokens=max_total_tokens,
    )  # fmt: skip
    return compare(name, expected, drive(load_model(config), prompts, step_tokens), tie)
