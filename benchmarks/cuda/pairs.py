"""A random target that writes recorded texts and a random draft model with a chosen acceptance, in one engine, with
Medusa heads that are never right: the cost and effect of speculation, whatever random models would generate.

Both run their real passes, then their logits are replaced (`benchmarks.speculation.synthetic_draft`). The target's
texts are forced, since rounding in bfloat16 would let wide steps write others.
"""

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from benchmarks.cuda import engines
from benchmarks.cuda.served import Store, settings_of
from benchmarks.cuda.setup import LlamaShape, Setup
from benchmarks.speculation.synthetic_draft import ForcedAcceptance, ForcedModel
from lorikeet.proto.params import Method, Speculation
from tests.shard.engine.harness import EngineHarness, EngineRequest, Run

CHANCE = 0.94
NUM_HEADS = 3


class Pair:
    """Target, draft model and recorded texts of random tokens."""

    def __init__(self, setup: Setup, shape: LlamaShape, draft: LlamaShape) -> None:
        num_texts, num_tokens = max(setup.loads), setup.prompt + setup.text
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            settings = {**engines.room(setup, num_texts, num_tokens + 64), **settings_of(setup, folder, 2)}
            config, model = engines.load(setup, shape, **settings, speculation_max_batch_size=num_texts)
            _, own = engines.load(setup, draft, page_size=model.page_size, max_total_tokens=num_tokens + 64)
            self.weight_ratio = draft.num_multiplied / shape.num_multiplied
            self._target, self._draft = ForcedModel.of(model, is_target=True), ForcedModel.of(own)
            self._engine = EngineHarness(config, self._target, self._draft)
            self.heads = Store(folder, model, setup.seed).heads(NUM_HEADS)
            self._engine.run(
                [EngineRequest([1, 2], 2, Speculation(Method.MEDUSA, 0, NUM_HEADS), heads_digest=self.heads)]
            )
        self.recorded = engines.prompts(setup, shape, num_texts, num_tokens)
        self._num_prompt, self._num_tokens = setup.prompt, setup.text
        self._num_rounds = 0

    def run(self, batch: int, how: Speculation, chance: float = CHANCE, name: str = "") -> dict[str, float]:
        """The first `batch` texts at once. Runs of one name share what schedules learn."""
        self._num_rounds += 1
        self._engine.learn_as(name)
        forced = self._target.forced = self._draft.forced = ForcedAcceptance(chance, self.recorded, self._num_rounds)
        with engines.uncollected():
            runs = self._engine.run([self._wanted(ids, how) for ids in self.recorded[:batch]], forced.began)
        self._target.forced = self._draft.forced = None
        for run, ids in zip(runs, self.recorded, strict=False):
            if [*run.wanted.prompt_ids, *run.token_ids] != ids:
                raise RuntimeError("the target did not write what is recorded")
        return {**engines.step_of(runs), **counts_of(runs)}

    def _wanted(self, ids: Sequence[int], how: Speculation) -> EngineRequest:
        if how.method is Method.LOOKUP:  # it finds the text itself, and so is always right
            how = replace(how, prediction_ids=tuple(ids[self._num_prompt :]))
        heads = self.heads if how.takes_heads else ""
        return EngineRequest(ids[: self._num_prompt], self._num_tokens, how, heads_digest=heads)


def counts_of(runs: Sequence[Run]) -> dict[str, float]:
    """Tokens a step of one request, drafts, and the medians of what the phases of steps with drafts took."""
    steps = [gave for run in runs for gave in run.steps[1:-1]]  # a last one may be short
    drafted = [gave for gave in steps if gave.num_drafted]
    phases = [median(gave.seconds[phase] for gave in drafted) if drafted else 0.0 for phase in range(3)]
    return {
        "tau": sum(len(gave.token_ids) for gave in steps) / max(1, len(steps)),
        "drafted": sum(gave.num_drafted for gave in steps),
        "accepted": sum(gave.num_accepted for gave in steps),
        **dict(zip(("proposing", "verifying", "accepting"), phases, strict=True)),
    }
