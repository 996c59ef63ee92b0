"""Every kind of adapter of the installed PEFT: served as PEFT computes it, or refused with the reason."""

import json
import shutil
import signal
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, PeftType
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from peft.tuners.lora import variants
from safetensors.torch import load_file, save_file
from structlog.testing import capture_logs

from lorikeet.adapters.errors import AdapterInvalid, NotServed
from lorikeet.adapters.formats import configuration
from lorikeet.adapters.formats.folding import factor
from lorikeet.adapters.formats.kinds import KINDS, VARIANTS
from lorikeet.adapters.loader.config import LoaderConfig
from lorikeet.adapters.loader.worker import WorkerContext, WorkerJobs
from lorikeet.adapters.sources.registry import SourceSettings
from tests import tiny
from tests.adapters import kinds, making

DOCS = Path(__file__).parents[3] / "docs" / "adapters.md"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make("llama", tmp_path_factory.mktemp("kinds") / "base", seed=1)


def test_every_type_of_peft_has_a_row() -> None:
    assert set(KINDS) >= {member.value for member in PeftType}
    served = {name for name, kind in KINDS.items() if kind.how != "refused"}
    compared = set(kinds.CONFIGS | kinds.VIRTUAL | kinds.PREFIXES)
    assert served == set(KINDS) & compared, "a type that is served is compared with PEFT"
    assert all(kind.reason for kind in KINDS.values() if kind.how == "refused")


def test_every_variant_of_lora_is_known() -> None:
    """Another one of a newer PEFT is compared with PEFT below, or refused, before it is in this list."""
    names = {name.removesuffix("Variant") for name in vars(variants) if name.endswith("Variant")} - {"Lora"}
    assert names == {
        "ALoraLinear", "ArrowLinear", "BdLoraLinear", "DoraConv1d", "DoraConv2d", "DoraConv3d", "DoraEmbedding",
        "DoraLinear", "KasaLinear", "MiCAEmbedding", "MiCALinear", "MontecloraLinear", "QALoraLinear", "VeloraLinear",
        "_DoraConvNd",
    }  # fmt: skip


def test_pages_count_the_types_other_than_lora() -> None:
    others = sum(kind.how != "refused" for name, kind in KINDS.items() if name != "LORA")
    for page in ("README.md", "CHANGELOG.md"):
        assert f"{others} more of PEFT's types" in (DOCS.parents[1] / page).read_text(), page


ROWS = {
    "lora": "by its own factors",
    "tokens": "rows of the embedding",
    "scale": "as factors of outputs",
    "norms": "as factors of the outputs of norms",
    "virtual": "as tokens before the prompt",
    "prefix": "as keys and values before those of the prompt",
    "folded": "as factors that compute the same",
    "of base": "the same, from the base's weights",
    "refused": "rejected: ",
}
"""How a row of the documentation's table begins, by how a type is served."""


@pytest.mark.parametrize("name", [*KINDS, *VARIANTS])
def test_the_documentation_has_every_type_in_the_right_row(name: str) -> None:
    rows = [
        line.split(" | ") for line in DOCS.read_text().splitlines() if line.startswith("| ") and f"`{name}`" in line
    ]
    kind = (KINDS | VARIANTS)[name]
    how = "of base" if kind.reads_base else kind.how
    assert [row[1].startswith(ROWS[how]) for row in rows] == [True], rows


@pytest.mark.parametrize("name", kinds.CONFIGS)
def test_a_kind_computes_what_peft_computes(name: str, base: Path, tmp_path: Path) -> None:
    adapter = kinds.make(name, base, tmp_path / "adapter")
    reader, facts = making.make_reader(base)
    expected = making.of_peft(base, adapter)
    assert (expected - making.logits(making.load_base(base))).abs().max() > 0.05, "the adapter changes something"
    served = making.lay_out(reader, facts, adapter)
    torch.testing.assert_close(making.of_layout(base, served), expected, rtol=1e-4, atol=1e-4)


def test_a_change_of_weights_that_were_not_read_is_refused(base: Path, tmp_path: Path) -> None:
    """The names of tensors say which weights are read. PEFT computes what a file lacks of TinyLoRA from them, again."""
    adapter = kinds.make("TINYLORA", base, tmp_path / "adapter")
    weights = adapter / "adapter_model.safetensors"
    tensors = load_file(weights)
    save_file({key: tensor for key, tensor in tensors.items() if ".layers.0.self_attn.v_proj." not in key}, weights)
    with pytest.raises(AdapterInvalid, match=r"lacks the tensors of model\.layers\.0\.self_attn\.v_proj"):
        making.lay_out(*making.make_reader(base), adapter)


@pytest.mark.parametrize("name", ["trained tokens", "TRAINABLE_TOKENS", "whole ends", "whole embedding"])
def test_new_rows_of_a_tied_embedding_are_the_heads_where_peft_says_so(name: str, tmp_path: Path) -> None:
    tied = tiny.make("llama", tmp_path / "tied", seed=1, tie_word_embeddings=True)
    adapter = kinds.make(name, tied, tmp_path / "adapter")
    served = making.lay_out(*making.make_reader(tied), adapter)
    expected = making.of_peft(tied, adapter)
    torch.testing.assert_close(making.of_layout(tied, served), expected, rtol=1e-4, atol=1e-4)


def test_scales_include_the_bias_of_the_base(tmp_path: Path) -> None:
    """Qwen2's projections have one."""
    qwen = tiny.make("qwen2", tmp_path / "qwen2", seed=1)
    adapter = kinds.make("IA3", qwen, tmp_path / "adapter")
    served = making.lay_out(*making.make_reader(qwen), adapter)
    scaled = {name.removesuffix(".scale") for name in served.tensors if name.endswith("_proj.scale")}
    assert any(f"{name}.bias" in served.tensors for name in scaled), served.tensors.keys()
    expected = making.of_peft(qwen, adapter)
    torch.testing.assert_close(making.of_layout(qwen, served), expected, rtol=1e-4, atol=1e-4)


def test_scales_of_an_output_with_a_bias_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    """As with a `.gguf` file: the bias would keep its size."""
    qwen = tiny.make("qwen2", tmp_path / "qwen2", seed=1)
    adapter = kinds.make("IA3", qwen, tmp_path / "adapter")
    (qwen / "model.safetensors").unlink()
    with pytest.raises(NotServed, match=r"q_proj\.bias is needed"):
        making.lay_out(*making.make_reader(qwen), adapter)


def test_scales_with_a_new_bias_scale_the_new_one(tmp_path: Path) -> None:
    qwen = tiny.make("qwen2", tmp_path / "qwen2", seed=1)
    name = "model.layers.0.self_attn.q_proj"
    bias = making.load_base(qwen).get_submodule(name).bias.detach()
    adapter = kinds.make("IA3", qwen, tmp_path / "adapter")
    weights = adapter / "adapter_model.safetensors"
    tensors = load_file(weights)
    save_file({**tensors, f"base_model.model.{name}.bias": bias + 1}, weights)
    served = making.lay_out(*making.make_reader(qwen), adapter)
    scale = tensors[f"base_model.model.{name}.ia3_l"].reshape(-1)
    torch.testing.assert_close(served.tensors[f"{name}.bias"], scale * (bias + 1) - bias)


@pytest.mark.parametrize("first", ["base_layer.", ""])
def test_two_tensors_for_one_parameter_of_the_base_are_refused(first: str, base: Path, tmp_path: Path) -> None:
    adapter = kinds.make("LOHA", base, tmp_path / "adapter")
    weights = adapter / "adapter_model.safetensors"
    own = making.load_base(base).lm_head.weight.detach()
    keys = (f"base_model.model.lm_head.{first}weight", "base_model.model.lm_head.modules_to_save.weight")
    save_file({**load_file(weights), keys[0]: own.clone(), keys[1]: own + 1}, weights)
    with pytest.raises(AdapterInvalid, match="are values of one parameter"):
        making.lay_out(*making.make_reader(base), adapter)


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("PROMPT_TUNING", {"num_virtual_tokens": 19}, r"has the shape \[20, 64\], but must have \[19, 64\]"),
        (
            "PROMPT_TUNING",
            {"num_virtual_tokens": 10**9},
            "`num_virtual_tokens` is 1000000000; it must be from 1 to",
        ),
        ("PROMPT_TUNING", {"num_transformer_submodules": 2}, "for an encoder and a decoder"),
        ("PREFIX_TUNING", {"num_layers": 2}, "it was made for 2 layers"),
        ("PREFIX_TUNING", {"num_attention_heads": "2"}, "`num_attention_heads` is 2; it must be a whole number"),
        ("PREFIX_TUNING", {"token_dim": 16}, r"but must have \[9, 96\]"),
    ],
)
def test_virtual_tokens_that_do_not_fit_are_rejected(
    name: str, changes: dict[str, object], reason: str, base: Path, tmp_path: Path
) -> None:
    adapter = kinds.make(name, base, tmp_path / "adapter")
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | changes))
    with pytest.raises((AdapterInvalid, NotServed), match=reason):
        making.lay_out(*making.make_reader(base), adapter)


def test_the_one_task_of_multitask_prompt_tuning_is_served(base: Path, tmp_path: Path) -> None:
    adapter = kinds.make("MULTITASK_PROMPT_TUNING", base, tmp_path / "adapter")
    model = PeftModel.from_pretrained(making.load_base(base), adapter).eval()
    with torch.no_grad():
        (expected,) = model.get_prompt(1, task_ids=torch.tensor([0]))
    served = making.lay_out(*making.make_reader(base), adapter)
    torch.testing.assert_close(served.tensors["model.embed_tokens.virtual"], expected)


def test_several_tasks_are_rejected_with_the_way_out(base: Path, tmp_path: Path) -> None:
    adapter = kinds.make("MULTITASK_PROMPT_TUNING", base, tmp_path / "adapter", num_tasks=2)
    with pytest.raises(NotServed, match=r"`num_tasks`.* EXACT_SOURCE_TASK"):
        making.lay_out(*making.make_reader(base), adapter)
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | {"num_tasks": 1}))
    with pytest.raises(AdapterInvalid, match=r"`prefix_task_cols`.* do not fit each other"):
        making.lay_out(*making.make_reader(base), adapter)


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind.how == "refused"])
def test_other_types_are_refused_with_the_reason(name: str) -> None:
    with pytest.raises(NotServed) as refused:
        configuration.served({"peft_type": name})
    assert name in str(refused.value) and KINDS[name].reason in str(refused.value)


def test_a_type_that_is_not_known_is_refused() -> None:
    with pytest.raises(NotServed, match=r"`peft_type` NEWLORA .* does not know the type"):
        configuration.served({"peft_type": "NEWLORA"})


def test_a_type_of_a_newer_peft_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(PEFT_TYPE_TO_CONFIG_MAPPING, PeftType.TINYLORA)
    with pytest.raises(NotServed, match=r"`peft_type` TINYLORA need a newer PEFT than \d"):
        configuration.served({"peft_type": "TINYLORA"})


def test_a_rank_above_the_devices_is_refused_with_the_way_out(base: Path, tmp_path: Path) -> None:
    reader, facts = making.make_reader(base)
    adapter = kinds.make("LOHA", base, tmp_path / "adapter")
    small = making.layout.Base(facts.hash, facts.weights_hash, facts.dtype, facts.kinds, facts.values, max_rank=2)
    with pytest.raises(NotServed, match=r"has rank \d+; the limit on this device is 2: .*`convert_to_lora`"):
        making.lay_out(reader, small, adapter)


def test_a_module_that_is_not_linear_is_found() -> None:
    weight = torch.randn(24, 16, dtype=torch.float64)
    with pytest.raises(ArithmeticError, match="not linear"):
        factor(lambda x: (x @ weight).relu(), 24, 16, 1.0)


@pytest.mark.parametrize(("rank", "expected"), [(1, 1), (16, 16), (40, 64)])
def test_factors_have_the_rank_of_the_map_or_all_of_its_outputs(rank: int, expected: int) -> None:
    torch.manual_seed(0)
    a, b = torch.randn(rank, 96, dtype=torch.float64), torch.randn(64, rank, dtype=torch.float64)
    found_a, found_b = factor(lambda x: x @ a.t() @ b.t(), 96, 64, 1.0)
    assert found_a is not None and found_b is not None and found_a.shape == (expected, 96)
    torch.testing.assert_close(found_b @ found_a, (b @ a).float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("is_strict", [False, True])
def test_an_adapter_that_changes_nothing_is_served_with_a_warning(is_strict: bool, base: Path, tmp_path: Path) -> None:
    making.make_adapter(base, tmp_path / "sound", LoraConfig(r=4, target_modules=["q_proj"]))
    shutil.copytree(tmp_path / "sound", tmp_path / "empty")
    weights = tmp_path / "empty" / "adapter_model.safetensors"
    tensors = load_file(weights)
    save_file(
        {key: torch.zeros_like(tensor) if "lora_B" in key else tensor for key, tensor in tensors.items()}, weights
    )
    sources = SourceSettings(strict=is_strict)
    store = str(tmp_path / "store")
    config = LoaderConfig(socket="", model_path=str(base), adapter_store=store, dtype="float32", sources=sources)
    jobs = WorkerJobs(WorkerContext(config))
    try:
        assert jobs.convert({"folder": str(tmp_path / "sound")})["entry"]["changes_nothing"] is False
        expected: Any = pytest.raises(AdapterInvalid, match="it changes nothing") if is_strict else nullcontext()
        with capture_logs() as logs, expected:
            assert jobs.convert({"folder": str(tmp_path / "empty")})["entry"]["changes_nothing"] is True
        assert any("it changes nothing" in entry.get("warning", "") for entry in logs)
        if not is_strict:  # found in the store
            assert jobs.convert({"folder": str(tmp_path / "empty")})["entry"]["changes_nothing"] is True
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
