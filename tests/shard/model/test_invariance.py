"""A request's logits have equal bits alone, in a batch, in chunks and computed again on other pages."""

from pathlib import Path

import pytest
import torch

from lorikeet.shard.batch.segments import Segment
from lorikeet.shard.config import ShardConfig
from lorikeet.shard.model import Model, load_model
from tests import tiny

LENGTH = 40
WIDE = {"vocab_size": 4096, "hidden_size": 512, "num_hidden_layers": 1}
"""Where a processor's product has more ways than one to go about it."""
CASES = {
    **{name: (name, {}) for name in ("llama", "gpt2", "mixtral", "gemma3_text", "gpt_oss")},
    "tied": ("llama", {**WIDE, "tie_word_embeddings": True}),
    "wide mixtral": ("mixtral", WIDE),
}
SAMPLE = (
    ("llama", "float32"),
    ("gpt2", "bfloat16"),
    ("mixtral", "float32"),
    ("gemma3_text", "bfloat16"),
    ("gpt_oss", "float32"),
    ("tied", "bfloat16"),
)


def logits_of(model: Model, shares: list[tuple[int, list[int], torch.Tensor]]) -> list[torch.Tensor]:
    """Logits of every token. shares: start, pages and token ids of each segment."""
    ids = torch.cat([part for _, _, part in shares])
    segments = [Segment(start, len(part), pages) for start, pages, part in shares]
    model.inputs.fill(segments, ids, torch.arange(len(ids)))
    return list(model.forward().split([len(part) for _, _, part in shares]))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(name, dtype, marks=() if (name, dtype) in SAMPLE else pytest.mark.long)
        for name in CASES
        for dtype in ("float32", "bfloat16")
    ],
)
def test_equal_bits_however_a_request_is_run(name: str, dtype: str, tmp_path: Path) -> None:
    architecture, values = CASES[name]
    folder = tiny.make(architecture, tmp_path, **values)
    check(load_model(ShardConfig(name, str(folder), "unix:/dev/null", dtype=dtype)))


def check(model: Model) -> None:
    """Whether one request's bits are equal, however it is run."""
    model.allocate_kv(16)
    generator = torch.Generator().manual_seed(3)
    ids, other = (torch.randint(0, tiny.VOCAB, (n,), generator=generator) for n in (LENGTH, 57))
    alone = logits_of(model, [(0, [4, 9], ids)])[0]
    in_company = logits_of(model, [(0, [1, 2], other), (0, [5, 3], ids)])[1]
    assert torch.equal(in_company, alone)
    for chunk in (1, 7, 16):
        parts = [logits_of(model, [(s, [6, 7], ids[s : s + chunk])])[0] for s in range(0, LENGTH, chunk)]
        assert torch.equal(torch.cat(parts), alone), f"chunks of {chunk}"


def test_a_step_without_wanted_logits(tmp_path: Path) -> None:
    model = load_model(ShardConfig("llama", str(tiny.make("llama", tmp_path)), "unix:/dev/null"))
    model.allocate_kv(4)
    ids = torch.arange(5)
    model.inputs.fill([Segment(0, 5, [1])], ids, torch.empty(0, dtype=torch.long))
    assert model.forward().shape == (0, tiny.VOCAB)
