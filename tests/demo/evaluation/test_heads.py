"""The committed heads: they can be read, fit the base, and a sample of their figures holds."""

from pathlib import Path

import pytest
import torch

from lorikeet.adapters.formats import heads as heads_format
from lorikeet.adapters.medusa import training
from lorikeet.adapters.medusa.target import DevicePlacement, Target
from lorikeet.demo.evaluation.heads import load, write
from lorikeet.demo.training import lora
from lorikeet.demo.training.heads import ALL, HEADS_FOLDER
from lorikeet.demo.training.model import BASE_FOLDER

FAMILY_FOLDER = Path(lora.__file__).parents[1]
MAX_FAMILY_BYTES = 32_000_000
NUM_SAMPLED = 12


@pytest.mark.parametrize(("kind", "least"), [pytest.param("base", 1.25, marks=pytest.mark.long), ("citation", 2.2)])
def test_heads_draft_several_tokens_per_step(kind: str, least: float) -> None:
    adapter = ALL[kind].adapter
    folder = None if adapter is None else str(lora.ADAPTERS_FOLDER / adapter)
    target = Target(str(BASE_FOLDER), folder, DevicePlacement(torch.device("cpu"), torch.float32))
    written = write(target, kind, NUM_SAMPLED)
    found = training.measure(target, load(HEADS_FOLDER / kind, target), written)
    assert found.tokens_per_step >= least  # over a dozen texts; `lorikeet.demo.evaluation heads` takes a hundred
    heads = heads_format.read(HEADS_FOLDER / kind, print)
    assert (heads.shape.num_heads, heads.shape.hidden_size) == (3, target.hidden_size)


def test_joined_heads_and_adapter_equal_the_separate_ones() -> None:
    alone, joined = (heads_format.read(HEADS_FOLDER / name, print) for name in ("citation", "citation-joined"))
    assert alone.tensors.keys() == joined.tensors.keys()
    assert all(torch.equal(tensor, joined.tensors[name]) for name, tensor in alone.tensors.items())
    adapter, joined = lora.ADAPTERS_FOLDER / "citation", HEADS_FOLDER / "citation-joined"
    assert (adapter / lora.WEIGHTS_FILE).read_bytes() == (joined / lora.WEIGHTS_FILE).read_bytes()


def test_the_demo_models_are_small() -> None:
    files = [path for path in FAMILY_FOLDER.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert sum(path.stat().st_size for path in files) <= MAX_FAMILY_BYTES
