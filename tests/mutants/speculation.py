"""Faults of speculative decoding. M1 to M14 are faults of other systems."""

from tests.mutants.mutant import Mutant

SAMPLER, DRAFTING, REJECTION = "shard/sampling/sampler.py", "shard/sampling/drafting.py", "shard/sampling/rejection.py"
PLAN, BLOCK, SCHEDULER = "shard/sampling/plan.py", "shard/sampling/plan.py", "shard/scheduler/scheduler.py"
DRAFT_MODEL, DRAFTER = "shard/speculation/draft_model.py", "shard/speculation/draft_network.py"
DISTRIBUTION = "tests/shard/sampling/test_rejection.py"
KERNEL, POSITIONS = (
    f"{DISTRIBUTION}::test_what_is_emitted_follows_the_target",
    f"{DISTRIBUTION}::test_every_position_follows_the_target",
)
LEARNING = "tests/shard/learning/test_learning.py"
JOINT = "tests/shard/engine/test_distribution.py::test_three_tokens_follow_the_exact_joint_distribution"
ENGINE_DISTRIBUTION = f"{JOINT}[drafts, rejection, fewer requests]"
ONE_DISTRIBUTION = f"{JOINT}[drafts, rejection, one distribution]"
"""With more requests per distribution."""
DRAFT = "tests/shard/startup/test_draft_model.py"
TEXT = f"{DRAFT}::test_every_text_is_what_it_is_without"

MUTANTS = [
    Mutant(
        "history drafts come from outputs of other tenants",
        "shard/speculation/history.py",
        "return request.tenant, request.adapter_digest",
        'return "", request.adapter_digest',
        "tests/shard/engine/test_history.py::test_another_tenant_gets_no_drafts[two]",
    ),
    Mutant(
        "history records an adapter's output as the base model's",
        "shard/speculation/history.py",
        "self._index.add(self.pair(request), ",
        'self._index.add((request.tenant, ""), ',
        "tests/shard/engine/test_history.py::test_another_adapter_gets_no_drafts",
    ),
    Mutant(
        "a key marked isolate gets history drafts",
        "router/requests/request.py",
        "if self.key is not None and self.key.is_marked_isolate:",
        "if False:",
        "tests/router/api/routes/test_history.py::test_with_a_key_its_name_is_the_tenant_and_isolated_keys_have_none",
    ),
    Mutant(
        "heads learned from one tenant's outputs draft for other tenants",
        "shard/speculation/medusa.py",
        "return request.learner, request.adapter_digest",
        'return "", request.adapter_digest',
        f"{LEARNING}::test_only_the_tenant_that_heads_were_learned_from_uses_them[values0]",
    ),
    Mutant(
        "a purge leaves learned heads in use",
        "shard/learning/learning.py",
        'pair.candidate = ""\n            self._draft_with(pair, "")',
        'pair.candidate = ""',
        f"{LEARNING}::test_a_purge_deletes_rows_heads_and_decisions",
    ),
    Mutant(
        "a request does not release the heads that were swapped out",
        "shard/scheduler/scheduler.py",
        "for digest in set(before) - set(request.digests):",
        "for digest in ():",
        f"{LEARNING}::test_texts_are_the_same_while_heads_are_swapped_under_them",
        raises="RuntimeError",  # of the check of users at the end
    ),
    Mutant(
        "heads are trained on rows of an overwritten block",
        "adapters/medusa/learning.py",
        "labels[torch.from_numpy(~self._is_current(indices))] = NOTHING",
        "labels[torch.from_numpy(~self._is_current(indices))] += 0",
        "tests/shard/learning/test_rings.py::test_nothing_is_learned_from_rows_that_were_replaced_meanwhile",
    ),
    Mutant(
        "heads are learned from outputs of a key marked isolate",
        "router/api/prepare.py",
        "if info.learning:\n        return caller.tenant(fields.cache_salt)",
        'if info.learning:\n        return "x"',
        "tests/router/api/routes/test_learning.py::test_keys_that_are_marked_isolate_take_no_part",
    ),
    Mutant(
        "M1 the most likely token of the residual distribution is taken instead of a sample",
        REJECTION,
        "arg_max(residual.log_() - noise)",
        "arg_max(residual)",
        f"{KERNEL}[random distributions]",
    ),
    Mutant(
        "M2 greedy requests with rejection verification are sampled",
        PLAN,
        "return self.params.do_sample\n",
        "return self.params.do_sample or self.rejects\n",
        f"{DISTRIBUTION}::test_greedy_rows_take_no_part",
        more=((SAMPLER, "rejects=rejects and params.do_sample", "rejects=rejects"),),
    ),
    Mutant(
        "M3 rejection sampling applies the temperature twice to the target's scores",
        SAMPLER,
        "rejection_sample(scores, draft_probs,",
        "rejection_sample(scores / chunk.temperature, draft_probs,",
        f"{POSITIONS}[temperature]",
    ),
    Mutant(
        "M4 every draft token is verified with the same random number",
        REJECTION,
        "row_keys(seeds, positions, Purpose.ACCEPT)",
        "row_keys(seeds * 0, positions * 0, Purpose.ACCEPT)",
        f"{KERNEL}[random distributions]",
    ),
    Mutant(
        "M5 a draft token is dropped or kept by its token id",
        DRAFTER,
        "return draws, draws.to_host()",
        "return draws, {row: ids[:1] + [i for i in ids[1:2] if i % 3] for row, ids in draws.to_host().items()}",
        ONE_DISTRIBUTION,
    ),
    Mutant(
        "M6 penalties ignore the draft tokens before a position",
        BLOCK,
        "level = depth if row.depends_on_history else 0",
        "level = 0",
        f"{DRAFT}::test_the_same_model_drafts_what_is_drawn[all penalties]",
    ),
    Mutant(
        "M7 the last draft token counts as computed by the draft model when all are accepted",
        DRAFT_MODEL,
        "min(num_accepted, len(item.draft_ids) - 1)",
        "min(num_accepted, len(item.draft_ids))",
        f"{TEXT}[default]",
    ),
    Mutant(
        "M7 the target's KV cache keeps the entry of a rejected draft token",
        SCHEDULER,
        "request.num_computed += num_accepted",
        "request.num_computed += min(len(item.draft_ids), num_accepted + 1)",
        f"{TEXT}[default]",
    ),
    Mutant(
        "M8 every draft token is verified with the draft distribution of the first one",
        DRAFTING,
        "self._distribution_at.get((row.row, depth), -1)",
        "self._distribution_at.get((row.row, 0), -1)",
        f"{POSITIONS}[two drafts]",
    ),
    Mutant(
        "M9 the bonus token is drawn from a residual distribution instead of the target's",
        DRAFTING,
        "at, drafted = [0] * block.num_tokens, [0] * block.num_tokens",
        "at, drafted = [1] * block.num_tokens, [0] * block.num_tokens",
        f"{POSITIONS}[two drafts]",
    ),
    Mutant(
        "M10 a stop token does not end the output if accepted draft tokens follow it",
        SCHEDULER,
        "if token_id in request.stop_ids or request.constraint",
        "if (len(taken) == len(token_ids) and token_id in request.stop_ids) or request.constraint",
        f"{DRAFT}::test_a_text_ends_at_its_stop_inside_a_block",
    ),
    Mutant(
        "M11 a draft token is accepted if its target probability exceeds 0.1",
        REJECTION,
        "accepted = uniforms(row_keys(seeds, positions, Purpose.ACCEPT)) * q < p",
        "accepted = p > 0.1",
        f"{KERNEL}[random distributions]",
    ),
    Mutant(
        "M12 greedy and sampling requests share a chunk of the sampler",
        PLAN,
        "for kind in (sampled, greedy):",
        "for kind in (sampled + greedy,):",
        f"{TEXT}[default]",
    ),
    Mutant(
        "M13 a step with draft tokens emits more than max_new_tokens",
        "shard/scheduler/proposer.py",
        "request.max_new_tokens - request.num_output - 1",
        "request.max_new_tokens - request.num_output + 2",
        f"{TEXT}[chunks of 7]",
        more=(
            (
                SCHEDULER,
                "if request.num_output + len(taken) >= request.max_new_tokens:",
                "if request.num_output + 1 >= request.max_new_tokens and len(taken) == len(token_ids):",
            ),
        ),
    ),
    Mutant(
        "M14 a rejected draft token is replaced from the target's distribution instead of the residual",
        REJECTION,
        "residual = torch.where(residual.sum(-1, keepdim=True) > 0, residual, target_probs)",
        "residual = target_probs.clone()",
        f"{KERNEL}[random distributions]",
    ),
]
