"""Faults of sampling."""

from tests.mutants.mutant import Mutant

DISTRIBUTION = "tests/shard/sampling/test_distribution.py::test_samples_follow_the_distribution"
BATCH = "tests/shard/sampling/test_batch.py"
SAMPLER, STATE = "shard/sampling/sampler.py", "shard/sampling/plan.py"
NOISE, PENALTIES = "shard/sampling/noise.py", "shard/sampling/penalties.py"

MUTANTS = [
    Mutant(
        "the noise of a token is the same at every position",
        NOISE,
        "keys + (positions + 1) * GOLDEN",
        "keys + (positions * 0 + 1) * GOLDEN",
        f"{DISTRIBUTION}[plain]",
    ),
    Mutant(
        "extra noise is added to the scores before the filters",
        STATE,
        "_filter(chunk, scores.div_(chunk.temperature))",
        "_filter(chunk, scores.div_(chunk.temperature)"
        " - log_exponentials(self.words, row_keys(chunk.seeds, chunk.seeds * 0, Purpose.DRAFT)))",
        f"{DISTRIBUTION}[top_p]",
    ),
    Mutant(
        "the temperature is applied twice",
        STATE,
        "scores.div_(chunk.temperature)",
        "scores.div_(chunk.temperature).div_(chunk.temperature)",
        f"{DISTRIBUTION}[temperature]",
    ),
    Mutant(
        "the temperature is applied after the filters",
        STATE,
        "_filter(chunk, scores.div_(chunk.temperature))",
        "_filter(chunk, scores) / chunk.temperature",
        f"{DISTRIBUTION}[temperature and filters]",
    ),
    Mutant(
        "frequency and presence penalties count prompt tokens",
        PENALTIES,
        "torch.bincount(known[num_prompt:],",
        "torch.bincount(known,",
        f"{DISTRIBUTION}[frequency]",
    ),
    Mutant(
        "the repetition penalty ignores prompt tokens",
        PENALTIES,
        "counts[known[:num_prompt]] |= PROMPT",
        "counts[known[:0]] |= PROMPT",
        f"{DISTRIBUTION}[repetition]",
    ),
    Mutant(
        "top_p and typical_p keep one token too few",
        "shard/sampling/filters.py",
        "(reached < mass).sum(-1, keepdim=True).clamp_(",
        "(reached < mass).sum(-1, keepdim=True).sub_(1).clamp_(min=0, ",
        f"{DISTRIBUTION}[top_p]",
    ),
    Mutant(
        "penalties do not count newly sampled tokens",
        PENALTIES,
        "self.table.view(-1).index_add_(0, slots * self._vocab_size + token_ids, changes)",
        "self.table.view(-1).index_add_(0, slots * self._vocab_size + token_ids, changes * 0)",
        f"{BATCH}::test_a_request_added_again_continues",
    ),
    Mutant(
        "a chunk reads the positions of the first rows of the batch",
        STATE,
        "positions.index_select(0, chunk.batch_rows)",
        "positions[: len(chunk.batch_rows)]",
        f"{BATCH}::test_a_batch_gives_the_bits_of_each_request_alone",
    ),
    Mutant(
        "the upper 32 bits of the seed are ignored",
        "shard/sampling/plan.py",
        "as_signed(self.params.seed)",
        "self.params.seed % 2**32",
        f"{BATCH}::test_a_seed_decides_the_text_and_only_a_seed",
    ),
    Mutant(
        "min_tokens counts prompt tokens",
        "shard/sampling/plan.py",
        "row.num_prompt + row.params.min_tokens",
        "row.params.min_tokens",
        "tests/shard/sampling/test_transforms.py::test_same_distribution_as_numpy[min tokens]",
    ),
    Mutant(
        "bad_words matches a word that begins in the prompt",
        "shard/sampling/plan.py",
        "row.num_prompt + len(word) - 1 for",
        "0 for",
        "tests/shard/sampling/test_transforms.py::test_same_distribution_as_numpy[bad words]",
    ),
    Mutant(
        "bad_words does not see newly sampled tokens",
        SAMPLER,
        "self._state.history.write(device_rows, at.index_select(0, recorded), token_ids)",
        "pass",
        f"{BATCH}::test_bad_words_are_found_in_the_sampled_tokens",
    ),
    Mutant(
        "the watermark always depends on the prompt's last token",
        SAMPLER,
        "self.last_tokens.index_copy_(0, plan.rows, sampled.token_ids)",
        "self.last_tokens.index_copy_(0, plan.rows, self.last_tokens.index_select(0, plan.rows))",
        "tests/shard/sampling/test_watermark.py::test_a_marked_text_is_green",
    ),
]
