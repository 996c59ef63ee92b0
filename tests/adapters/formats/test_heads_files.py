"""Files of heads: counting, precedence of the tensors, rejections. Written files are read back unchanged."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lorikeet.adapters.errors import HeadsError
from lorikeet.adapters.formats import heads as files
from lorikeet.adapters.formats.heads import HEADS_CONFIG, HEADS_FILE, PICKLED_FILE, MedusaShape
from tests.adapters.medusa import small

SHAPES = [MedusaShape(3, 1, 8), MedusaShape(2, 2, 8), MedusaShape(2, 1, 8, 20), MedusaShape(4, 0, 8, 20)]


def quiet(sentence: str) -> None:
    raise AssertionError(f"nothing was to be said, but: {sentence}")


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_written_heads_are_read_back(tmp_path: Path, shape: MedusaShape) -> None:
    heads = small.heads(shape)
    files.write(tmp_path, heads)
    again = files.read(tmp_path, quiet)
    assert again.shape == shape
    assert again.base_name == "tiny/base"
    assert again.tensors.keys() == heads.tensors.keys()
    assert all(torch.equal(again.tensors[name], heads.tensors[name]) for name in heads.tensors)


def test_a_written_file_has_the_names_that_servers_expect(tmp_path: Path) -> None:
    files.write(tmp_path, small.heads(MedusaShape(3, 1, 8)))
    config = json.loads((tmp_path / "config.json").read_text())
    assert config == {
        "base_model_name_or_path": "tiny/base",
        "medusa_num_heads": 3,
        "medusa_num_layers": 1,
        "version": "2",
    }
    tensors = load_file(tmp_path / "medusa_lm_head.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
        "0.0.linear.weight": (8, 8),
        "0.0.linear.bias": (8,),
        "1.0.linear.weight": (8, 8),
        "1.0.linear.bias": (8,),
        "2.0.linear.weight": (8, 8),
        "2.0.linear.bias": (8,),
    }


@pytest.mark.parametrize(
    ("stated", "said"),
    [
        ({"medusa_num_heads": 2}, "medusa_num_heads is 2, the tensors say 5"),
        ({"medusa_num_layers": 3}, "medusa_num_layers is 3, the tensors say 1"),
        ({"version": "2"}, "version is 2, the tensors say 1"),
        ({"version": 1.0, "medusa_num_heads": 5, "medusa_num_layers": 1}, None),
        ({}, None),
    ],
)
def test_the_tensors_take_precedence_over_the_configuration(
    tmp_path: Path, stated: dict[str, object], said: str | None
) -> None:
    files.write(tmp_path, small.heads(MedusaShape(5, 1, 8, 20)))
    (tmp_path / HEADS_CONFIG).write_text(json.dumps(stated))
    lines, warn = small.recorder()
    assert files.read(tmp_path, warn).shape == MedusaShape(5, 1, 8, 20)
    assert (said is None and not lines) or (len(lines) == 1 and said is not None and said in lines[0])


def test_heads_are_found_under_another_file_name_but_not_in_a_lora_file(tmp_path: Path) -> None:
    heads = small.heads(MedusaShape(2, 1, 8))
    save_file({"base_model.q.lora_A.weight": torch.ones(1)}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(HeadsError, match=r"holds no Medusa heads: there is no medusa_lm_head\.safetensors"):
        files.read(tmp_path, quiet)
    save_file(heads.tensors, tmp_path / "some_name.safetensors")
    assert files.read(tmp_path, quiet).shape == heads.shape


def test_ignored_tensors_are_named(tmp_path: Path) -> None:
    heads = small.heads(MedusaShape(2, 1, 8))
    files.write(tmp_path, heads)
    save_file({**heads.tensors, "lm_head.weight": torch.ones(2)}, tmp_path / HEADS_FILE)
    lines, warn = small.recorder()
    assert files.read(tmp_path, warn).shape == heads.shape
    assert "1 tensors belong to no head" in lines[0]
    assert "lm_head.weight" in lines[0]


Change = Callable[[dict[str, torch.Tensor]], object]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda t: t.pop("1.0.linear.bias"), r"3 heads of 1 blocks but lacks 1\.0\.linear\.bias"),
        (lambda t: [t.pop(name) for name in list(t) if name.startswith("1.")], r"lacks 1\.0\.linear\.weight"),
        (
            lambda t: t.update({"2.0.linear.weight": torch.zeros(8, 9)}),
            r"2\.0\.linear\.weight has shape \[8, 9\], the others need \[8, 8\]",
        ),
        (lambda t: t.update({"1.1.weight": torch.zeros(20, 8)}), r"1\.1\.weight does not belong"),
        (lambda t: t.clear() or t.update({"odd": torch.zeros(1)}), "no tensor is named like"),
        (lambda t: t.update({"0.0.linear.weight": torch.zeros(8)}), r"lacks 0\.0\.linear\.weight as a matrix"),
    ],
)
def test_broken_heads_are_rejected_with_the_name_of_the_tensor(tmp_path: Path, change: Change, sentence: str) -> None:
    tensors = small.heads(MedusaShape(3, 1, 8)).tensors
    change(tensors)
    save_file(tensors, tmp_path / HEADS_FILE)
    with pytest.raises(HeadsError, match=sentence):
        files.read(tmp_path, lambda _: None)


def test_a_truncated_file_and_a_folder_without_heads_are_rejected(tmp_path: Path) -> None:
    files.write(tmp_path, small.heads(MedusaShape(1, 1, 8)))
    whole = (tmp_path / HEADS_FILE).read_bytes()
    (tmp_path / HEADS_FILE).write_bytes(whole[:50])
    with pytest.raises(HeadsError, match="not a complete safetensors file"):
        files.read(tmp_path, quiet)
    with pytest.raises(HeadsError, match="there is no folder"):
        files.read(tmp_path / "nothing", quiet)


class _Runs:
    """Unpickled by the usual reader, it makes a folder."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.mkdir, (self.trace,))


def test_a_pickle_is_read_without_running_code(tmp_path: Path) -> None:
    heads = small.heads(MedusaShape(2, 1, 8, 20))
    torch.save(heads.tensors, tmp_path / PICKLED_FILE)
    assert files.read(tmp_path, quiet).shape == heads.shape
    trace = tmp_path / "trace"
    torch.save({"0.0.weight": _Runs(trace)}, tmp_path / PICKLED_FILE)
    with pytest.raises(HeadsError, match="a pickle may hold only tensors"):
        files.read(tmp_path, quiet)
    (tmp_path / PICKLED_FILE).write_bytes(pickle.dumps([1, 2]))
    with pytest.raises(HeadsError):
        files.read(tmp_path, quiet)
    assert not trace.exists()


def test_joining_copies_the_adapter_to_the_heads(tmp_path: Path) -> None:
    adapter, out = tmp_path / "adapter", tmp_path / "out"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    (adapter / "adapter_model.safetensors").write_bytes(b"weights")
    (adapter / "README.md").write_text("not needed")
    files.write(out, small.heads(MedusaShape(1, 1, 8)))
    files.join(out, adapter)
    assert sorted(path.name for path in out.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
        "config.json",
        "medusa_lm_head.safetensors",
    ]
    assert (out / "adapter_model.safetensors").read_bytes() == b"weights"
