"""Merged adapters compute what PEFT's `add_weighted_adapter` computes, and the same everywhere."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig

from lorikeet.adapters.errors import AdapterInvalid, NotServed
from lorikeet.adapters.formats import configuration, layout
from lorikeet.adapters.formats import weights as weight_files
from lorikeet.adapters.formats.changes import TENSORS, ModuleChange, merge
from lorikeet.adapters.refs import Merge, Pin, SourceKind
from tests import tiny
from tests.adapters import making

DIGEST = "d" * 64


class World:
    """A base and adapters of it, by name."""

    def __init__(self, folder: Path) -> None:
        self.base = tiny.make("llama", folder / "base")
        self.reader, self.facts = making.make_reader(self.base)
        self.folder = folder
        settings: dict[str, dict[str, Any]] = {
            "first": {"r": 8, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"]},
            "second": {"r": 8, "lora_alpha": 20, "target_modules": ["q_proj", "down_proj", "embed_tokens"]},
            "third": {"r": 8, "use_rslora": True, "target_modules": ["q_proj", "embed_tokens"]},
            "narrow": {"r": 3, "target_modules": ["q_proj", "v_proj"]},
            "dora": {"r": 8, "target_modules": ["q_proj"], "use_dora": True},
            "saved": {"r": 8, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
        }
        for number, (name, setting) in enumerate(settings.items()):
            making.make_adapter(self.base, folder / name, LoraConfig(**setting), seed=number)

    def wanted(self, names: list[str], weights: list[float], strategy: str, density: float = 1.0, **more: Any) -> Merge:
        pins = [Pin(SourceKind.LOCAL, name, "r").as_dict() for name in names]
        return Merge.from_dict({"pins": pins, "weights": weights, "strategy": strategy, "density": density, **more})

    def merged(self, merging: Merge, digest: str = DIGEST) -> layout.ServedLayout:
        parts = []
        for pin in merging.pins:
            values = configuration.parse(weight_files.read_small(self.folder / pin.id / "adapter_config.json"))
            with weight_files.opened(self.folder / pin.id, making.LIMIT) as opened:
                changes = layout.without_unchanged(self.reader.read(values, opened), self.facts)
                parts.append([detached(change) for change in changes])
        return layout.lay_out(layout.decide(merge(parts, merging, digest), self.facts), self.facts)

    def by_peft(self, merge: Merge) -> torch.Tensor:
        names = [pin.id for pin in merge.pins]
        model = peft.PeftModel.from_pretrained(making.load_base(self.base), self.folder / names[0], names[0])
        for name in names[1:]:
            model.load_adapter(self.folder / name, name)
        model.add_weighted_adapter(
            names, list(merge.weights), "merged", merge.strategy, density=merge.density,
            majority_sign_method=merge.majority_sign_method,
        )  # fmt: skip
        model.set_adapter("merged")
        return making.logits(model.eval())


def detached(change: ModuleChange) -> ModuleChange:
    tensors: dict[str, Any] = {
        field: tensor.clone() for field in TENSORS if (tensor := getattr(change, field)) is not None
    }
    return replace(change, **tensors)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("merging"))


@pytest.mark.parametrize("method", ["total", "frequency"])
@pytest.mark.parametrize("strategy", ["linear", "ties", "cat"])
@pytest.mark.parametrize("weights", [[1.0, 1.0, 1.0], [0.6, -0.3, 0.2]])
def test_a_merge_computes_what_pefts_does(strategy: str, weights: list[float], method: str, world: World) -> None:
    merging = world.wanted(["first", "second", "third"], weights, strategy, 0.4, majority_sign_method=method)
    served = making.of_layout(world.base, world.merged(merging))
    torch.testing.assert_close(served, world.by_peft(merging), rtol=1e-4, atol=1e-4)
    assert (served - making.logits(making.load_base(world.base))).abs().mean() > 1e-3


def test_cat_accepts_any_ranks_and_is_the_exact_sum(world: World) -> None:
    merging = world.wanted(["first", "narrow"], [0.5, 2.0], "cat")
    served = world.merged(merging)
    name = "model.layers.1.self_attn.q_proj"
    assert served.modules[name]["rank"] == 11
    parts = [making.lay_out(world.reader, world.facts, world.folder / name).tensors for name in ("first", "narrow")]
    expected = 0.5 * parts[0][f"{name}.B"] @ parts[0][f"{name}.A"] + 2.0 * parts[1][f"{name}.B"] @ parts[1][f"{name}.A"]
    torch.testing.assert_close(served.tensors[f"{name}.B"] @ served.tensors[f"{name}.A"], expected)


@pytest.mark.parametrize("strategy", ["dare_linear", "dare_ties"])
def test_the_mask_of_dare_depends_on_the_digest(strategy: str, world: World) -> None:
    merging = world.wanted(["first", "third"], [1.0, 1.0], strategy, 0.5)
    world.merged(merging)  # PEFT draws when it reads an embedding's adapter for the first time
    torch.manual_seed(1)
    first = world.merged(merging)
    state = torch.random.get_rng_state()
    torch.manual_seed(2)
    again, other = world.merged(merging), world.merged(merging, "e" * 64)
    assert all(torch.equal(again.tensors[name], tensor) for name, tensor in first.tensors.items())
    assert not any(torch.equal(other.tensors[name], tensor) for name, tensor in first.tensors.items())
    torch.manual_seed(1)
    assert torch.equal(torch.random.get_rng_state(), state)  # nobody else's random numbers are used


def test_dare_keeps_a_share_and_scales_it_up(world: World) -> None:
    merging = world.wanted(["first"], [1.0], "dare_linear", 0.25)
    whole = world.merged(world.wanted(["first"], [1.0], "linear"))
    pruned = world.merged(merging)
    name = "model.layers.0.self_attn.q_proj.A"
    kept = pruned.tensors[name] != 0
    assert 0.15 < kept.float().mean() < 0.35
    torch.testing.assert_close(pruned.tensors[name][kept], whole.tensors[name][kept] * 4)
    assert not torch.equal(kept, pruned.tensors["model.layers.1.self_attn.q_proj.A"] != 0)


def test_dare_without_pruning_equals_pefts(world: World) -> None:
    merging = world.wanted(["first", "second"], [0.3, 0.9], "dare_linear", 1.0)
    served = making.of_layout(world.base, world.merged(merging))
    linear = world.by_peft(world.wanted(["first", "second"], [0.3, 0.9], "linear"))
    torch.testing.assert_close(served, linear, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("strategy", ["linear", "ties", "dare_linear", "dare_ties"])
def test_unequal_ranks_are_named(strategy: str, world: World) -> None:
    with pytest.raises(AdapterInvalid, match="first has 8, narrow has 3"):
        world.merged(world.wanted(["first", "narrow"], [1, 1], strategy, 0.5))


@pytest.mark.parametrize(("name", "reason"), [("dora", "DoRA.*dora"), ("saved", "lm_head of saved")])
def test_adapters_that_cannot_be_merged_are_named(name: str, reason: str, world: World) -> None:
    with pytest.raises(NotServed, match=reason):
        world.merged(world.wanted(["first", name], [1, 1], "linear"))


def test_a_merged_rank_above_the_limit_is_rejected(world: World) -> None:
    with pytest.raises(AdapterInvalid, match="rank 640"):
        big = [[ModuleChange("m", "linear", 320, a=torch.ones(320, 2), b=torch.ones(2, 320))]] * 2
        merge(big, world.wanted(["first", "second"], [1, 1], "cat"), DIGEST)


PINS = [Pin(SourceKind.LOCAL, name, "r").as_dict() for name in ("a", "b")]


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"pins": []}, "0 adapters"),
        ({"pins": PINS * 20}, "40 adapters"),
        ({"weights": [1.0]}, "`weights` must be"),
        ({"weights": [1.0, float("nan")]}, "`weights` must be"),
        ({"weights": [1.0, "x"]}, "`weights` must be"),
        ({"weights": [1.0, 1e9]}, "`weights` must be"),
        ({"strategy": "svd"}, "svd"),
        ({"strategy": None}, "None"),
        ({"strategy": "ties"}, "density"),
        ({"strategy": "dare_ties", "density": 0.0}, "density"),
        ({"strategy": "dare_ties", "density": 1.1}, "density"),
        ({"strategy": "ties", "density": 0.5, "majority_sign_method": "loudest"}, "loudest"),
    ],
)
def test_invalid_merge_parameters_are_rejected(values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(AdapterInvalid, match=sentence):
        Merge.from_dict({"pins": PINS, "weights": [1.0, 1.0], **values})


def test_the_digest_covers_what_the_strategy_uses() -> None:
    def digest(parts: tuple[str, str] = ("x", "y"), **values: Any) -> str:
        return Merge.from_dict({"pins": PINS, "weights": [1.0, 2.0], **values}).digest(list(parts))

    assert digest(strategy="linear", density=0.5) == digest(strategy="linear", majority_sign_method="frequency")
    different = [
        digest(), digest(("y", "x")), digest(weights=[2.0, 1.0]), digest(strategy="cat"),
        digest(strategy="ties", density=0.5), digest(strategy="ties", density=0.6),
        digest(strategy="ties", density=0.5, majority_sign_method="frequency"),
        digest(strategy="dare_ties", density=0.5),
    ]  # fmt: skip
    assert len(set(different)) == len(different)


@given(
    st.dictionaries(
        st.sampled_from(("weights", "strategy", "density", "majority_sign_method")),
        st.none() | st.text() | st.floats() | st.lists(st.integers()),
    )
)
def test_arbitrary_merge_parameters_raise_only_adapter_errors(values: dict[str, Any]) -> None:
    try:
        merge = Merge.from_dict({"pins": PINS, **values})
    except AdapterInvalid:
        return
    assert Merge.from_dict(merge.as_dict()) == merge
