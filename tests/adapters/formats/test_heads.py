"""Medusa heads in adapters' files, alone and with a LoRA: reading, resizing, warnings and rejections."""

import json
import operator
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file

from lorikeet.adapters.errors import AdapterError, AdapterInvalid, AdapterTooLarge, NotServed
from lorikeet.adapters.formats import heads as files
from lorikeet.adapters.formats import layout
from lorikeet.adapters.formats.heads import MedusaShape, resized
from lorikeet.adapters.formats.layout import ServedLayout
from lorikeet.adapters.sources.base import choose, find_heads
from lorikeet.adapters.store import Entry, Store
from tests import tiny
from tests.adapters import hostile, making
from tests.adapters.medusa import small

NAN = torch.full((64, 64), float("nan"))
SHAPES = [
    MedusaShape(3, 1, 64),
    MedusaShape(2, 2, 64),
    MedusaShape(5, 1, 64, tiny.VOCAB),
    MedusaShape(2, 0, 64, tiny.VOCAB),
]


class Base:
    """What lays adapters out for one base."""

    def __init__(self, folder: Path) -> None:
        self.folder = tiny.make("llama", folder)
        self.reader, facts = making.make_reader(self.folder)
        self.facts = replace(facts, kinds=facts.kinds | {"heads"})

    def lay_out(self, folder: Path, limit: int = making.LIMIT) -> tuple[ServedLayout, tuple[str, ...]]:
        with layout.open_adapter(folder, limit) as opened:
            served, heads_layout = opened.lay_out(self.reader, self.facts)
            tensors = {name: tensor.clone() for name, tensor in heads_layout.tensors.items()}
            return ServedLayout(tensors, heads_layout.modules, heads_layout.heads), served.warnings

    def digest(self, folder: Path) -> str:
        with layout.open_adapter(folder, making.LIMIT) as opened:
            return opened.digest


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    return Base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def lora(base: Base, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    return making.make_adapter(base.folder, tmp_path_factory.mktemp("lora"), config)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_head_of_a_file_is_laid_out(base: Base, tmp_path: Path, shape: MedusaShape) -> None:
    heads = small.heads(shape)
    files.write(tmp_path, heads)
    heads_layout, warnings = base.lay_out(tmp_path)
    assert heads_layout.heads == {"count": shape.num_heads, "version": shape.version, "layers": shape.num_layers}
    assert not heads_layout.modules and heads_layout.rank == 0 and not warnings
    expected = {}
    for name, tensor in heads.tensors.items():
        head, block, *rest = name.split(".")
        middle = f".{block}" if shape.num_layers > 1 else ""
        expected[f"heads.{head}.output" if rest == ["weight"] else f"heads.{head}{middle}.{rest[1]}"] = tensor
    assert heads_layout.tensors.keys() == expected.keys()
    assert all(torch.equal(heads_layout.tensors[name], tensor) for name, tensor in expected.items())


def test_heads_and_a_lora_in_one_folder_are_one_adapter(base: Base, lora: Path, tmp_path: Path) -> None:
    files.write(tmp_path, small.heads(SHAPES[0]))
    alone = base.digest(tmp_path)
    files.join(tmp_path, lora)
    heads_layout, _ = base.lay_out(tmp_path)
    expected, _ = base.lay_out(lora)
    assert heads_layout.modules == expected.modules and heads_layout.heads is not None and expected.heads is None
    assert all(torch.equal(heads_layout.tensors[name], tensor) for name, tensor in expected.tensors.items())
    assert {
        name for name in heads_layout.tensors if name.startswith("heads.")
    } == heads_layout.tensors.keys() - expected.tensors
    assert len({alone, base.digest(tmp_path), base.digest(lora)}) == 3
    again = base.digest(tmp_path)
    (tmp_path / "config.json").write_text('{"medusa_num_heads": 7}')
    assert base.digest(tmp_path) == again, "what heads' configuration says does not count"
    save_file(small.heads(SHAPES[0], seed=1).tensors, tmp_path / "medusa_lm_head.safetensors")
    assert base.digest(tmp_path) != again


def test_the_digest_of_an_adapter_without_heads_is_unchanged(base: Base, lora: Path) -> None:
    with layout.open_adapter(lora, making.LIMIT) as opened:
        assert opened.changes is not None and opened.values is not None
        canonical = layout.configuration.canonical(opened.values)
        assert opened.digest == layout.refs.adapter_digest(canonical, opened.changes.hash.digest())


@pytest.mark.parametrize("num_rows", [tiny.VOCAB - 5, tiny.VOCAB + 7])
def test_output_matrices_are_resized_to_the_vocabulary(base: Base, tmp_path: Path, num_rows: int) -> None:
    heads = small.heads(MedusaShape(2, 1, 64, num_rows))
    files.write(tmp_path, heads)
    heads_layout, warnings = base.lay_out(tmp_path)
    output, whole = heads_layout.tensors["heads.1.output"], heads.tensors["1.1.weight"]
    common = min(num_rows, tiny.VOCAB)
    assert output.shape == (tiny.VOCAB, 64) and torch.equal(output[:common], whole[:common])
    rows = -torch.ones(3, 64) * whole.mean(0).sign()
    assert (rows @ output.t()).argmax(-1).max() < common, "tokens outside the heads' vocabulary are never proposed"
    assert f"know {num_rows} tokens, the base has {tiny.VOCAB}" in warnings[0]


def test_missing_rows_never_win() -> None:
    matrix = -torch.ones(3, 4)
    logits = torch.ones(4) @ resized(matrix, 6).t()
    assert logits.argmax() == 0 and logits.shape == (6,)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"medusa_num_heads": 2, "medusa_num_layers": 1}, ["medusa_num_heads is 2, the tensors say 5"]),
        ({"medusa_num_heads": 5, "version": "2"}, ["version is 2, the tensors say 1"]),
        ({"medusa_num_heads": "x" * 1000}, ["medusa_num_heads is xxx"]),
        ({"model_type": "llama"}, []),
        ([1], ["config.json cannot be read"]),
        (None, []),
    ],
)
def test_a_configuration_that_contradicts_the_tensors_causes_a_warning(
    base: Base, tmp_path: Path, config: Any, expected: list[str]
) -> None:
    files.write(tmp_path, small.heads(SHAPES[2]))
    (tmp_path / "config.json").unlink() if config is None else (tmp_path / "config.json").write_text(json.dumps(config))
    heads_layout, warnings = base.lay_out(tmp_path)
    assert heads_layout.heads == {"count": 5, "version": 1, "layers": 1}
    assert len(warnings) == len(expected) and all(map(operator.contains, warnings, expected))
    assert all(len(warning) < 300 for warning in warnings)


def test_pickled_heads_give_their_tensors(base: Base, tmp_path: Path) -> None:
    heads = small.heads(SHAPES[2])
    torch.save(heads.tensors, tmp_path / "medusa_lm_head.pt")
    heads_layout, _ = base.lay_out(tmp_path)
    assert torch.equal(heads_layout.tensors["heads.4.output"], heads.tensors["4.1.weight"])


def test_heads_under_another_file_name_are_found_by_content(base: Base, tmp_path: Path) -> None:
    save_file({"model.norm.weight": torch.ones(4)}, tmp_path / "a.safetensors")
    with pytest.raises(AdapterInvalid, match=r"no adapter_config\.json and no medusa_lm_head\.safetensors"):
        base.lay_out(tmp_path)
    save_file(small.heads(SHAPES[0]).tensors, tmp_path / "some_name.safetensors")
    heads_layout, _ = base.lay_out(tmp_path)
    assert heads_layout.heads is not None and heads_layout.heads["count"] == 3


def put(name: str, tensor: torch.Tensor) -> Callable[[Path], object]:
    return changed(lambda tensors: tensors.update({name: tensor}))


def changed(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], object]:
    def write(file: Path) -> None:
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file)

    return write


def pickled(content: bytes) -> Callable[[Path], object]:
    def write(file: Path) -> None:
        file.unlink()
        file.with_suffix(".pt").write_bytes(content)

    return write


def raw(change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    return lambda file: file.write_bytes(change(file.read_bytes()))


def thin(num_heads: int) -> Callable[[Path], object]:
    return lambda file: save_file(small.heads(MedusaShape(num_heads, 1, 64)).tensors, file)


BROKEN: dict[str, tuple[Callable[[Path], object], type[AdapterError], str]] = {
    "a bias too few": (changed(lambda t: t.pop("1.0.linear.bias")), AdapterInvalid, r"lacks 1\.0\.linear\.bias"),
    "a head too few": (
        changed(lambda t: [t.pop(key) for key in list(t) if key.startswith("1.")]),
        AdapterInvalid,
        r"lacks 1\.0\.linear\.weight",
    ),
    "a head without number": (put("99999999.0.linear.weight", torch.ones(64, 64)), AdapterInvalid, "more heads"),
    "a block without number": (put("0.99999999.linear.weight", torch.ones(64, 64)), AdapterInvalid, "more heads"),
    "another hidden size": (
        lambda file: save_file(small.heads(MedusaShape(3, 1, 32)).tensors, file),
        AdapterInvalid,
        "another base.*rows of 32, the base has 64",
    ),
    "a matrix that is not square": (
        put("2.0.linear.weight", torch.ones(64, 65)),
        AdapterInvalid,
        r"2\.0\.linear\.weight has shape \[64, 65\]",
    ),
    "a vector for a matrix": (put("0.0.linear.weight", torch.ones(64)), AdapterInvalid, "as a matrix"),
    "an output matrix of one head": (put("1.1.weight", torch.ones(320, 64)), AdapterInvalid, "does not belong"),
    "no rows": (
        lambda file: save_file(small.heads(MedusaShape(2, 1, 64, 0)).tensors, file),
        AdapterInvalid,
        "have no rows",
    ),
    "few rows": (
        lambda file: save_file(small.heads(MedusaShape(32, 0, 64, tiny.VOCAB // 2 - 1)).tensors, file),
        AdapterInvalid,
        "another base.*have 159 rows, the base's vocabulary 320",
    ),
    "no heads": (changed(lambda t: t.clear() or t.update({"odd": torch.ones(1)})), AdapterInvalid, "no Medusa heads"),
    "many heads": (thin(33), NotServed, "33 heads"),
    "NaN": (put("1.0.linear.weight", NAN), AdapterInvalid, r"not finite.*1\.0\.linear\.weight"),
    "infinity": (put("2.0.linear.bias", torch.full((64,), float("inf"))), AdapterInvalid, "not finite"),
    "whole numbers": (put("0.0.linear.bias", torch.ones(64, dtype=torch.int32)), AdapterInvalid, "I32"),
    "a name without end": (put("x" * 4000, torch.ones(1)), AdapterInvalid, "name"),
    "empty": (raw(lambda content: b""), AdapterInvalid, "empty"),
    "truncated": (raw(lambda content: content[:-100]), AdapterInvalid, "truncated"),
    "a header without end": (raw(lambda content: b"\xff" * 8 + content[8:]), AdapterInvalid, "header claims"),
    "a header of noise": (raw(lambda content: content[:8] + b"\x93" * len(content[8:])), AdapterInvalid, "not JSON"),
    "a pickle with code": (
        pickled(hostile.saved({"0.0.weight": hostile.Exploit("/tmp/must-not-exist-by-heads")})),
        AdapterInvalid,
        "was not run",
    ),
    "a compressed archive": (
        pickled(hostile.compressed(hostile.saved({"0.0.weight": torch.zeros(1 << 20)}))),
        AdapterInvalid,
        "compressed",
    ),
    "a pickled list": (pickled(hostile.saved([torch.ones(1)])), AdapterInvalid, "no dictionary"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_heads_are_rejected_with_the_reason(case: str, base: Base, tmp_path: Path) -> None:
    change, kind, sentence = BROKEN[case]
    files.write(tmp_path, small.heads(SHAPES[0]))
    base.lay_out(tmp_path)
    change(tmp_path / "medusa_lm_head.safetensors")
    with pytest.raises(kind, match=f"(?is){sentence}") as refused:
        base.lay_out(tmp_path)
    assert refused.value.status == 422
    assert len(str(refused.value)) < 600 and "\n" not in str(refused.value)
    assert not list(Path("/tmp").glob("must-not-exist-by-*"))


def test_overflow_in_the_bases_dtype_is_distinguished_from_infinity(base: Base, tmp_path: Path) -> None:
    heads = small.heads(SHAPES[0])
    heads.tensors["0.0.linear.bias"][3] = 1e6
    files.write(tmp_path, heads)
    base.lay_out(tmp_path)
    with (
        layout.open_adapter(tmp_path, making.LIMIT) as opened,
        pytest.raises(AdapterInvalid, match=r"0\.0\.linear\.bias is too large for float16"),
    ):
        opened.lay_out(base.reader, replace(base.facts, dtype=torch.float16))


def test_kinds_that_no_shard_supports_are_rejected(base: Base, lora: Path, tmp_path: Path) -> None:
    files.write(tmp_path, small.heads(SHAPES[0]))
    files.join(tmp_path, lora)
    with layout.open_adapter(tmp_path, making.LIMIT) as opened, pytest.raises(NotServed, match="Medusa heads"):
        opened.lay_out(base.reader, replace(base.facts, kinds=frozenset({"linear"})))


def test_the_size_limit_covers_heads_and_lora_together(base: Base, lora: Path, tmp_path: Path) -> None:
    files.write(tmp_path, small.heads(SHAPES[0]))
    files.join(tmp_path, lora)
    sizes = [(tmp_path / name).stat().st_size for name in ("medusa_lm_head.safetensors", "adapter_model.safetensors")]
    base.lay_out(tmp_path, sum(sizes))
    with pytest.raises(AdapterTooLarge):
        base.lay_out(tmp_path, sum(sizes) - 1)


def test_files_chosen_from_a_listing() -> None:
    def peek(name: str) -> bytes:
        return b'xx{"0.0.linear.weight":{' if name == "odd.safetensors" else b'xx{"model.layers.0.0.weight":{'

    both: dict[str, int | None] = {
        "adapter_config.json": 10,
        "adapter_model.safetensors": 60,
        "config.json": 5,
        "medusa_lm_head.safetensors": 30,
        "medusa_lm_head.pt": 30,
        "odd.safetensors": 1000,
    }
    chosen = choose(both, "a/b", 90, peek)
    assert chosen == ["adapter_config.json", "config.json", "medusa_lm_head.safetensors", "adapter_model.safetensors"]
    with pytest.raises(AdapterTooLarge):
        choose(both, "a/b", 89, peek)
    alone = {name: size for name, size in both.items() if not name.startswith("adapter")}
    assert choose(alone, "a/b", 30, peek) == ["config.json", "medusa_lm_head.safetensors"]
    assert find_heads(["medusa_lm_head.pt", "odd.safetensors"], peek) == "medusa_lm_head.pt"
    assert find_heads(["model.safetensors", "odd.safetensors"], peek) == "odd.safetensors"
    assert find_heads(["adapter_config.json", "odd.safetensors"], peek) is None
    for names in (["model.safetensors"], ["medusa_lm_head.safetensors", "adapter_model.safetensors"]):
        with pytest.raises(AdapterInvalid, match=r"holds no adapter_config\.json"):
            choose(dict.fromkeys(names, 1), "a/b", 90, peek)
    with pytest.raises(AdapterInvalid, match=r"holds no adapter_model\.safetensors"):
        choose({"adapter_config.json": 1, "medusa_lm_head.safetensors": 1}, "a/b", 90, peek)


def test_the_store_records_the_number_of_heads(base: Base, lora: Path, tmp_path: Path) -> None:
    names = (base.facts.hash, base.facts.weights_hash, "float32")
    store = Store(tmp_path / "store", 1 << 30, names)
    files.write(tmp_path / "heads", small.heads(SHAPES[0]))
    for folder, num_heads, rank in ((tmp_path / "heads", 3, 0), (lora, 0, 4)):
        digest, (heads_layout, _) = base.digest(folder), base.lay_out(folder)
        file = layout.served_file(heads_layout, digest, base.facts)
        store.add(digest, file.num_bytes, file.write)
        entry = store.entry(digest)
        assert (entry.num_heads, entry.rank) == (num_heads, rank) and store.touch(digest)
        assert Entry.from_dict(entry.as_dict()) == entry
    with pytest.raises(ValueError):
        Entry.from_dict({"digest": "d", "num_bytes": 1, "rank": 1})
