"""Faults of embedding and classification models: truncation, pooling, adapters, encoding of results."""

from tests.mutants.mutant import Mutant

ARCHITECTURES = "tests/shard/model/pooling/test_architectures.py"
ADAPTERS = "tests/shard/model/pooling/test_adapters.py"
ENCODING = "tests/router/text/test_encoding.py"
ROUTES = "tests/router/api/routes/test_pooled.py"

MUTANTS = [
    Mutant(
        "CLS pooling takes the last token",
        "shard/startup/build.py",
        'PooledRows(Rows.FIRST if pooled.pooling == "cls" else Rows.LAST)',
        "PooledRows(Rows.LAST)",
        f"{ARCHITECTURES}::test_what_follows_the_pooling_is_that_of_sentence_transformers",
    ),
    Mutant(
        "vectors are normalized across the step instead of one by one",
        "shard/model/pooling/steps.py",
        "nn.functional.normalize(x.float(), dim=-1)",
        "nn.functional.normalize(x.float(), dim=0)",
        f"{ARCHITECTURES}::test_what_follows_the_pooling_is_that_of_sentence_transformers",
    ),
    Mutant(
        "mean pooling subtracts running sums, so a vector's bits depend on the prompts before it",
        "shard/model/pooling/network.py",
        'means = torch.segment_reduce(hidden_states[:num_tokens].float(), "mean", lengths=lengths, axis=0)',
        "sums = hidden_states[:num_tokens].float().cumsum(0)[lengths.cumsum(0) - 1]\n"
        "        means = sums.diff(dim=0, prepend=torch.zeros_like(sums[:1])) / lengths[:, None]",
        f"{ARCHITECTURES}::test_vectors_equal_transformers_alone_and_in_a_batch[bert]",
    ),
    Mutant(
        "the mean replaces the first vector of a prompt with one vector per token",
        "shard/model/pooling/network.py",
        "if not segment.per_token]",
        "]",
        f"{ARCHITECTURES}::test_every_token_has_a_vector_next_to_pooled_ones[mean]",
    ),
    Mutant(
        "truncation leaves no room for special tokens",
        "router/text/tokenizer.py",
        "left = cut.most - num_added",
        "left = cut.most",
        f"{ENCODING}::test_texts_and_pairs_are_cut_as_by_the_library",
    ),
    Mutant(
        "a text is always truncated on the right",
        "router/text/tokenizer.py",
        "part.truncate(size, direction=cut.side)",
        'part.truncate(size, direction="right")',
        f"{ENCODING}::test_texts_and_pairs_are_cut_as_by_the_library",
    ),
    Mutant(
        "every result of a step gets the classification head of the first request's adapter",
        "shard/batch/inputs.py",
        "head_slots[: len(wanted)] = wanted",
        "head_slots[: len(wanted)] = wanted[:1]",
        f"{ADAPTERS}::test_requests_under_several_adapters_equal_peft[llama classify]",
    ),
    Mutant(
        "embeddings with fewer dimensions are not normalized again",
        "router/api/pooled_models.py",
        "return np.asarray(cut / np.maximum(np.linalg.norm(cut, axis=1, keepdims=True), 1e-12), np.float32)",
        "return cut",
        f"{ROUTES}::test_fewer_dimensions_have_length_one",
    ),
    Mutant(
        "base64 embeddings encode float64 values",
        "router/api/routes/pooled.py",
        'np.ascontiguousarray(values, "<f4")',
        'np.ascontiguousarray(values, "<f8")',
        f"{ROUTES}::test_base64_is_of_the_same_numbers",
    ),
]
