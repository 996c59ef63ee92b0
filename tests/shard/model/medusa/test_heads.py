"""Heads in a step: what plain torch makes of the same rows, bit for bit the same in any batch, and nothing else."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from lorikeet.adapters.formats import heads as files
from lorikeet.adapters.formats import layout
from lorikeet.adapters.formats.heads import HeadsFile, MedusaHeads, MedusaShape
from lorikeet.shard.adapters.manager import ModelSlots
from lorikeet.shard.batch.inputs import HeadsRow
from lorikeet.shard.batch.padding import Bounds
from lorikeet.shard.batch.segments import Segment
from lorikeet.shard.config import ShardConfig
from lorikeet.shard.model import Model, load_model
from lorikeet.shard.model.adapters.loading import AdapterFiles, HostLayout, SlotParts
from lorikeet.shard.model.lora.memory import Arena
from lorikeet.shard.model.lora.served_file import FORMAT, ServedFile, map_file
from lorikeet.shard.model.medusa.heads import read_heads
from tests import tiny
from tests.adapters import making
from tests.adapters.medusa import small
from tests.shard.padded import Always

IDS = [3, 250, 17, 17, 96, 5, 301, 44, 8, 120, 77]
SHAPES = {
    "version 2": MedusaShape(3, 1, 64),
    "version 2 of two blocks": MedusaShape(2, 2, 64),
    "version 1": MedusaShape(2, 1, 64, tiny.VOCAB),
    "version 1 without blocks": MedusaShape(4, 0, 64, tiny.VOCAB),
}


Worlds = Callable[..., "World"]


def write(path: Path, heads: HeadsFile, metadata: str | None = None) -> ServedFile:
    """A file of the served layout."""
    shape = heads.shape
    tensors = {}
    for name, tensor in heads.tensors.items():
        head, layer, *rest = name.split(".")
        middle = f".{layer}" if shape.num_layers > 1 else ""
        tensors[f"heads.{head}{middle}.{rest[1]}" if len(rest) > 1 else f"heads.{head}.output"] = tensor
    facts = {"count": shape.num_heads, "version": shape.version, "layers": shape.num_layers}
    metadata = json.dumps(facts) if metadata is None else metadata
    save_file(tensors, path, {"format": FORMAT, "digest": "d", "modules": "{}", "heads": metadata})
    return ServedFile(map_file(path))


class World:
    """A model as shards run it, and as plain torch does."""

    def __init__(self, folder: Path, name: str, dtype: str) -> None:
        # one whose head is its embedding too, and one that caps its logits
        small.base(folder, name, tie_word_embeddings=name == "gpt2")
        self.model = load_model(ShardConfig(name, str(folder), "unix:/dev/null", dtype=dtype))
        self.model.allocate_kv(32)
        self.target = small.target(folder)
        self._folder = folder

    def put(self, slot: int, heads: HeadsFile, is_for_device: bool = False) -> None:
        file = write(self._folder / f"{slot}.served", heads)
        content = read_heads(file, self.model.heads, Arena(1 << 24), self.model.info.dtype, is_for_device)
        assert content is not None
        on_device = content.on(content.memory.clone()) if content.packed is None else content.packed
        self.model.heads.put(slot, on_device)


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., World]:
    @cache
    def world(name: str = "llama", dtype: str = "float32") -> World:
        return World(tmp_path_factory.mktemp(name), name, dtype)

    return world


def run(model: Model, rows: Sequence[int], heads: Sequence[HeadsRow], ids: Sequence[int] = IDS) -> torch.Tensor:
    """One request's step; the logits of its `rows`, and of the heads."""
    segment = Segment(0, len(ids), [1, 2])
    model.inputs.fill([segment], torch.tensor(ids), torch.tensor(rows), rows, heads)
    return model.forward()


@pytest.mark.parametrize("is_for_device", [False, True], ids=["packed", "plain"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2"])
def test_heads_give_what_plain_torch_gives(name: str, shape: str, is_for_device: bool, worlds: Worlds) -> None:
    world = worlds(name)
    model, target = world.model, world.target
    heads, other = small.heads(SHAPES[shape]), small.heads(MedusaShape(1, 1, 64), seed=9)
    world.put(4, heads, is_for_device)
    world.put(2, other, is_for_device)
    (hidden,) = target.rows([IDS])
    reference = MedusaHeads.of(heads).logits(hidden, target.logits)
    if heads.shape.version == 1:
        reference = target._after(reference)  # what the network does to all logits, which changes no order
    of_other = MedusaHeads.of(other).logits(hidden, target.logits)
    count = heads.shape.num_heads
    rows = [5, 10, 7]
    logits = run(model, rows, [HeadsRow(0, 4, count), HeadsRow(2, 2, 1), HeadsRow(1, 4, 1)])
    expected = [target.logits(hidden[rows]), reference[5], of_other[7], reference[10, :1]]
    torch.testing.assert_close(logits, torch.cat(expected), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_draft_rows_have_equal_bits_in_any_batch(shape: str, dtype: str, worlds: Worlds) -> None:
    world = worlds(dtype=dtype)
    model = world.model
    count = SHAPES[shape].num_heads
    world.put(0, small.heads(SHAPES[shape]))
    world.put(1, small.heads(MedusaShape(5, 1, 64), seed=1))
    plain = run(model, [9], [])
    alone = run(model, [9], [HeadsRow(0, 0, count)])
    assert torch.equal(alone[:1], plain)
    first = run(model, [9], [HeadsRow(0, 0, 1)])
    assert torch.equal(first, alone[:2])
    rows = list(range(11))
    others = [HeadsRow(row, row % 2, count if row % 2 == 0 else 1 + row % 5) for row in rows]
    others[9] = HeadsRow(9, 0, count)
    together = run(model, rows, others)
    begin = len(rows) + sum(entry.num_drafts for entry in others[:9])
    assert torch.equal(together[begin : begin + count], alone[1:])
    assert torch.equal(together[9:10], plain)


def test_draft_rows_use_the_request_s_output_head(tmp_path: Path) -> None:
    """A LoRA on the output head counts for heads too, from its own file and from another's: so they were trained."""
    folder = small.base(tmp_path / "base")
    small.lora(folder, tmp_path / "both", ("q_proj", "lm_head"))
    heads = small.heads(MedusaShape(3, 1, 64), scale=0.3)
    files.write(tmp_path / "alone", heads)
    files.write(tmp_path / "both", heads)
    reader, facts = making.make_reader(folder)
    facts = replace(facts, kinds=facts.kinds | {"heads"})
    model = load_model(ShardConfig("llama", str(folder), "unix:/dev/null", dtype="float32"))
    model.allocate_kv(32)
    model.allocate_adapters(8)
    reading = AdapterFiles(model.lora_targets, HostLayout(torch.float32, Arena(1 << 20)), model.heads)
    slots = ModelSlots(model.heads, SlotParts(model.bindings, model.added_tokens))
    for slot, name in ((3, "both"), (5, "alone")):
        with layout.open_adapter(tmp_path / name, making.LIMIT) as opened:
            served = layout.served_file(opened.lay_out(reader, facts)[1], "d", facts)
            with (tmp_path / f"{name}.served").open("wb") as file:
                served.write(file)
        slots.put(slot, reading.read(tmp_path / f"{name}.served"))
    adapted, plain = small.target(folder, tmp_path / "both"), small.target(folder)
    for slot, target in ((3, adapted), (-1, plain)):
        (hidden,) = target.rows([IDS])
        reference = MedusaHeads.of(heads).logits(hidden, target.logits)
        segment = Segment(0, len(IDS), [1, 2], slot)
        asked = [HeadsRow(0, 5, 2), HeadsRow(1, 5 if slot < 0 else 3, 3)]
        model.inputs.fill([segment], torch.tensor(IDS), torch.tensor([10, 4]), [10, 4], asked)
        expected = torch.cat([target.logits(hidden[[10, 4]]), reference[10, :2], reference[4]])
        torch.testing.assert_close(model.forward(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_version_1_with_the_base_s_matrix_is_version_2(dtype: str, worlds: Worlds) -> None:
    world = worlds(dtype=dtype)
    model = world.model
    two = small.heads(MedusaShape(3, 1, 64), scale=0.5)
    matrix = world.target.model.get_output_embeddings().weight.detach()
    own = {f"{head}.1.weight": matrix.clone() for head in range(3)}
    one = HeadsFile(MedusaShape(3, 1, 64, tiny.VOCAB), {**two.tensors, **own})
    world.put(0, two)
    world.put(1, one)
    logits = run(model, [4, 9], [HeadsRow(0, 0, 3), HeadsRow(0, 1, 3), HeadsRow(1, 1, 2), HeadsRow(1, 0, 2)])[2:]
    assert torch.equal(logits[:3], logits[3:6]) and torch.equal(logits[6:8], logits[8:])
    assert logits[:3].argmax(-1).unique().numel() > 1


def test_more_heads_than_a_slot_has_are_an_error(worlds: Worlds) -> None:
    world = worlds()
    model = world.model
    world.put(0, small.heads(MedusaShape(2, 1, 64)))
    with pytest.raises(RuntimeError, match="slot 0 has 2 heads, the step needs 3"):
        run(model, [4], [HeadsRow(0, 0, 3)])
    model.heads.clear(0)
    with pytest.raises(RuntimeError, match="slot 0 has no heads"):
        run(model, [4], [HeadsRow(0, 0, 1)])
    assert run(model, [4], []).shape == (1, tiny.VOCAB)
    model.inputs.pad(Always(Bounds(num_rows=16, max_kv_len=16, num_drafts=4)))
    with pytest.raises(RuntimeError, match="in a padded step need kernels"):
        run(model, [4, 5], [])
    model.inputs.pad(None)


@pytest.mark.parametrize(
    ("metadata", "sentence"),
    [
        (
            '{"count":3,"version":2,"layers":1}',
            r"heads\.2\.weight of the adapter is nothing, the base needs \[64, 64\]",
        ),
        (
            '{"count":2,"version":1,"layers":1}',
            r"heads\.0\.output of the adapter is nothing, the base needs \[320, 64\]",
        ),
        ('{"count":2,"version":3,"layers":1}', "of version 3"),
        ('{"count":0,"version":2,"layers":1}', "0 heads"),
        ('{"count":2}', "does not describe its heads"),
        ("[]", "does not describe its heads"),
        ('{"count":1,"version":2,"layers":1}', r"does not support tensor heads\.1\.bias"),
    ],
)
def test_files_that_do_not_fit_are_rejected(metadata: str, sentence: str, worlds: Worlds, tmp_path: Path) -> None:
    pool = worlds().model.heads
    file = write(tmp_path / "file", small.heads(MedusaShape(2, 1, 64)), metadata)
    with pytest.raises(ValueError, match=sentence):
        read_heads(file, pool, Arena(1 << 20), torch.float32, False)


def test_a_slot_of_the_model_holds_what_a_file_holds(worlds: Worlds, tmp_path: Path) -> None:
    model = worlds().model
    model.allocate_adapters(8)
    write(tmp_path / "file", small.heads(MedusaShape(2, 1, 64)))
    destination = HostLayout(torch.float32, Arena(1 << 20))
    content = AdapterFiles(model.lora_targets, destination, model.heads).read(tmp_path / "file")
    assert content.num_heads == 2 and content.num_bytes >= 2 * 4 * (64 * 64 + 64)
    slots = ModelSlots(model.heads, SlotParts(model.bindings, model.added_tokens))
    slots.put(7, content)
    assert run(model, [4], [HeadsRow(0, 7, 2)]).shape == (3, tiny.VOCAB)
    slots.clear(7)
    with pytest.raises(RuntimeError, match="slot 7 has no heads"):
        run(model, [4], [HeadsRow(0, 7, 2)])
    with pytest.raises(ValueError, match="logits come from its output head"):
        AdapterFiles(model.lora_targets, destination).read(tmp_path / "file")
