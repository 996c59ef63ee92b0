"""Every setting of every type of adapter that the installed PEFT writes: computed as PEFT does, or refused."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import EvaConfig, LoraConfig, LoraGAConfig, PeftType
from peft.config import PeftConfig
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from peft.tuners.lora.config import BdLoraConfig, KasaConfig, MontecloraConfig, VeloraConfig
from safetensors.torch import load_file, save_file

from lorikeet.adapters.errors import AdapterInvalid, NotServed
from lorikeet.adapters.formats import configuration
from lorikeet.adapters.formats.kinds import KINDS
from tests import tiny
from tests.adapters import kinds, making

EVERY_TYPE = {field.name for field in dataclasses.fields(PeftConfig)}
"""What the adapter is for."""
OF_TRAINING = {
    "init_weights", "init_scale", "init_v_bound", "init_theta_d_bound", "init_vector_bank_bound", "init_logits_std",
    "init_ia3_weights", "d_initial", "rank_dropout", "rank_dropout_scale", "module_dropout", "progressbar",
    "init_r", "target_r", "tinit", "tfinal", "deltaT", "beta1", "beta2", "orth_reg_weight", "total_step",
    "tokenizer_name_or_path", "tokenizer_kwargs", "prompt_tuning_init", "prompt_tuning_init_text",
    "prompt_tuning_init_state_dict_path", "prompt_tuning_init_task",
    "opt_weighted_loss_type", "opt_loss_decay_factor", "opt_projection_epsilon", "opt_projection_format_epsilon",
    "cpt_token_ids", "cpt_mask", "cpt_tokens_type_mask", "num_frozen_tokens", "encoder_reparameterization_type",
    "encoder_hidden_size", "encoder_num_layers", "encoder_dropout", "prefix_projection", "generator_seed",
    "runtime_offload_base_weight", "runtime_config", "loftq_config", "corda_config", "megatron_core",
    "use_effective_conv2d", "regularization_alpha", "target_svd_config",
}  # fmt: skip
"""Settings that a trained adapter no longer depends on, or that are for convolutions. Those whose name ends in
`dropout` are more.
"""
SHAPES = {
    "num_virtual_tokens", "token_dim", "num_transformer_submodules", "num_attention_heads", "num_layers", "num_tasks",
    "num_ranks",
}  # fmt: skip
"""Of virtual tokens: compared with the tensors and the base."""
MODULES: dict[str, dict[str, Any]] = {
    "target_modules": {"target_modules": ["v_proj"]},
    "exclude_modules": {"exclude_modules": ["down_proj"]},
    "layers_to_transform": {"layers_to_transform": [1]},
    "layers_pattern": {"layers_to_transform": [0], "layers_pattern": "layers"},
    "modules_to_save": {"modules_to_save": ["lm_head"]},
    "bias": {"bias": "all"},
    "fan_in_fan_out": {"fan_in_fan_out": True},
}
"""Settings that types share: values other than those of `kinds.py`."""
VALUES: dict[str, dict[str, dict[str, Any]]] = {
    "BOFT": {
        "boft_block_size": {"boft_block_size": 8},
        "boft_block_num": {"boft_block_size": 0, "boft_block_num": 4},
        "boft_n_butterfly_factor": {"boft_n_butterfly_factor": 2},
    },
    "C3A": {"block_size": {"block_size": 8}, "block_size_pattern": {"block_size_pattern": {"q_proj": 8}}},
    "DEFT": {
        "r": {"r": 4}, "decomposition_method": {"decomposition_method": "qr"}, "alpha": {"alpha": 3},
        "para": {"para": True},
    },
    "DELORA": {
        "r": {"r": 4}, "delora_lambda": {"delora_lambda": 5}, "rank_pattern": {"rank_pattern": {"q_proj": 3}},
        "lambda_pattern": {"lambda_pattern": {"q_proj": 3}},
    },
    "FOURIERFT": {
        "n_frequency": {"n_frequency": 30}, "scaling": {"scaling": 40.0}, "random_loc_seed": {"random_loc_seed": 5},
        "n_frequency_pattern": {"n_frequency_pattern": {"q_proj": 20}},
    },
    "FROD": {
        "projection_prng_key": {"projection_prng_key": 4, "save_projection": False},
        "save_projection": {"save_projection": False}, "sparse_rate": {"sparse_rate": 0.2},
    },
    "GLORA": {
        "r": {"r": 4}, "config_A_B": {"config_A_B": "vector"}, "config_C": {"config_C": "vector"},
        "config_D_E": {"config_D_E": "vector"},
    },
    "GRALORA": {
        "r": {"r": 4}, "hybrid_r": {"hybrid_r": 4}, "alpha": {"alpha": 8}, "gralora_k": {"gralora_k": 4},
    },
    "HIRA": {"r": {"r": 4}, "rank_pattern": {"rank_pattern": {"q_proj": 3}}},
    "HRA": {"r": {"r": 4}, "apply_GS": {"apply_GS": True}},
    "IA3": {
        "target_modules": {"target_modules": ["v_proj"], "feedforward_modules": []},
        "feedforward_modules": {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
    },
    "LOHA": {
        "r": {"r": 3}, "alpha": {"alpha": 3}, "rank_pattern": {"rank_pattern": {"q_proj": 3}},
        "alpha_pattern": {"alpha_pattern": {"q_proj": 2}},
    },
    "LOKR": {
        "r": {"r": 3}, "alpha": {"alpha": 3}, "rank_pattern": {"rank_pattern": {"q_proj": 3}},
        "alpha_pattern": {"alpha_pattern": {"q_proj": 2}}, "decompose_both": {"decompose_both": True, "r": 2},
        "decompose_factor": {"decompose_factor": 4},
    },
    "LORA": {
        "r": {"r": 3}, "lora_alpha": {"lora_alpha": 3}, "use_rslora": {"use_rslora": True},
        "init_lora_weights": {"init_lora_weights": "gaussian"}, "rank_pattern": {"rank_pattern": {"q_proj": 3}},
        "alpha_pattern": {"alpha_pattern": {"q_proj": 3}}, "use_dora": {"use_dora": True},
        "trainable_token_indices": {"trainable_token_indices": [5]}, "lora_bias": {"lora_bias": True},
        "ensure_weight_tying": {"ensure_weight_tying": True, "modules_to_save": ["embed_tokens"]},
        "velora_config": {"velora_config": VeloraConfig()}, "kasa_config": {"kasa_config": KasaConfig()},
        "monteclora_config": {"monteclora_config": MontecloraConfig()},
        "use_qalora": {"use_qalora": True, "qalora_group_size": 8},
        "qalora_group_size": {"use_qalora": True, "qalora_group_size": 16},
        "use_bdlora": {"use_bdlora": BdLoraConfig(nblocks=2, target_modules_bd_a=kinds.TARGETS)},
        "lora_ga_config": {"init_lora_weights": "lora_ga", "lora_ga_config": LoraGAConfig()},
        "eva_config": {"init_lora_weights": "eva", "eva_config": EvaConfig()},
    },
    "MISS": {"r": {"r": 8}, "mini_r": {"init_weights": "mini", "r": 8, "mini_r": 4}},
    "OFT": {
        "r": {"r": 4, "oft_block_size": 0}, "oft_block_size": {"oft_block_size": 16}, "coft": {"coft": True},
        "eps": {"coft": True, "eps": 0.01}, "block_share": {"block_share": True},
        "use_cayley_neumann": {"use_cayley_neumann": False},
        "num_cayley_neumann_terms": {"num_cayley_neumann_terms": 2},
    },
    "OSF": {"effective_rank": {"effective_rank": 8}, "rank_pattern": {"rank_pattern": {"q_proj": 4}}},
    "PEANUT": {
        "r": {"r": 4}, "depth": {"depth": 1}, "act_fn": {"act_fn": "silu"}, "scaling": {"scaling": 0.5},
    },
    "PSOFT": {
        "r": {"r": 8}, "psoft_alpha": {"psoft_alpha": 8}, "ab_svd_init": {"ab_svd_init": "pissa_init"},
        "psoft_svd": {"psoft_svd": "lowrank"}, "psoft_svd_lowrank_niter": {"psoft_svd": "lowrank",
        "psoft_svd_lowrank_niter": 3}, "random_seed": {"psoft_svd": "lowrank", "random_seed": 3},
        "psoft_orth": {"psoft_orth": False}, "psoft_mag_b": {"psoft_mag_b": False},
        "psoft_mag_a": {"psoft_mag_a": False}, "use_cayley_neumann": {"use_cayley_neumann": True},
        "num_cayley_neumann_terms": {"use_cayley_neumann": True, "num_cayley_neumann_terms": 2},
        "cayley_neumann_eps": {"use_cayley_neumann": True, "cayley_neumann_eps": 0.1},
    },
    "PVERA": {
        "r": {"r": 8}, "projection_prng_key": {"projection_prng_key": 4, "save_projection": False},
        "save_projection": {"save_projection": False},
    },
    "RANDLORA": {
        "r": {"r": 8}, "projection_prng_key": {"projection_prng_key": 4, "save_projection": False},
        "save_projection": {"save_projection": False}, "sparse": {"sparse": True},
        "very_sparse": {"very_sparse": True}, "randlora_alpha": {"randlora_alpha": 10},
    },
    "ROAD": {"variant": {"variant": "road_2"}, "group_size": {"group_size": 8}},
    "SHIRA": {"r": {"r": 4}, "mask_type": {"mask_type": "random"}, "random_seed": {"random_seed": 3}},
    "SUPERTUNING": {
        "sparsity": {"sparsity": 0.9}, "select_top": {"select_top": False}, "r": {"r": 4},
        "lora_alpha": {"r": 4, "lora_alpha": 3}, "save_precomputed_indices": {"save_precomputed_indices": False},
    },
    "TINYLORA": {
        "r": {"r": 3}, "u": {"u": 16}, "weight_tying": {"weight_tying": 1.0},
        "projection_seed": {"projection_seed": 3, "save_projection": False},
        "save_projection": {"save_projection": False},
    },
    "TRAINABLE_TOKENS": {
        "token_indices": {"token_indices": [3]}, "target_modules": {"target_modules": ["embed_tokens"]},
    },
    "UNILORA": {
        "r": {"r": 3}, "proj_seed": {"proj_seed": 3}, "theta_d_length": {"theta_d_length": 64},
        "save_indices": {"save_indices": True},
    },
    "VBLORA": {
        "r": {"r": 3}, "num_vectors": {"num_vectors": 20}, "vector_length": {"vector_length": 16},
        "topk": {"topk": 3}, "save_only_topk_weights": {"save_only_topk_weights": True},
    },
    "VERA": {
        "r": {"r": 8}, "projection_prng_key": {"projection_prng_key": 4, "save_projection": False},
        "save_projection": {"save_projection": False},
    },
    "WAVEFT": {
        "n_frequency": {"n_frequency": 30}, "scaling": {"scaling": 5.0}, "random_loc_seed": {"random_loc_seed": 5},
        "wavelet_family": {"wavelet_family": "sym2"}, "use_idwt": {"use_idwt": False},
        "n_frequency_pattern": {"n_frequency_pattern": {"q_proj": 20}},
        "proportional_parameters": {"proportional_parameters": True},
    },
}  # fmt: skip
"""By type and setting: values other than those of `kinds.py`."""

REFUSED: dict[tuple[str, str], Any] = {
    ("LORA", "arrow_config"): {"num_experts": 2},
    ("LORA", "layer_replication"): [[0, 1], [0, 1]],
    ("LORA", "megatron_config"): {"hidden_size": 64},
    ("PVERA", "sample_at_inference"): True,
}
"""Settings that are rejected with an error that names them."""
ELSEWHERE = {
    ("LORA", "alora_invocation_tokens"): "tests/shard/engine/test_activated_lora.py",
    ("LORA", "target_parameters"): "tests/shard/engine/adapter_exactness.py",
}
"""Settings that need another base, or positions: the file that compares them with PEFT."""
OFTEN = {
    ("LORA", "use_rslora"), ("LORA", "rank_pattern"), ("PSOFT", "psoft_orth"), ("RANDLORA", "sparse"),
    ("SUPERTUNING", "r"), ("SUPERTUNING", "save_precomputed_indices"), ("VBLORA", "save_only_topk_weights"),
    ("OFT", "coft"), ("UNILORA", "save_indices"),
}  # fmt: skip
"""Those that every run of the tests compares."""


def fields_of(kind: str) -> set[str]:
    """The settings of a type that a trained adapter depends on, as far as they are not those of LoRA."""
    fields = {field.name for field in dataclasses.fields(PEFT_TYPE_TO_CONFIG_MAPPING[kind])}
    if kind == "ADALORA":
        fields = (fields - {field.name for field in dataclasses.fields(LoraConfig)}) | set(MODULES)
    return {name for name in fields - EVERY_TYPE - OF_TRAINING - SHAPES if not name.endswith("dropout")}


SERVED = sorted(
    {member.value for member in PeftType if KINDS[member.value].how not in ("refused", "virtual", "prefix")}
)
CASES = [
    (kind, name)
    for kind in SERVED
    for name in sorted(fields_of(kind))
    if name in VALUES.get(kind, {}) or name in MODULES
]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make("llama", tmp_path_factory.mktemp("fields") / "base", seed=1)


@pytest.mark.parametrize("kind", SERVED)
def test_every_setting_of_a_type_is_compared_with_peft_or_refused(kind: str) -> None:
    """One of a newer PEFT needs a value above, or is one of training."""
    known = {*CASES, *REFUSED, *ELSEWHERE}
    assert {name for name in fields_of(kind) if (kind, name) not in known} == set()


@pytest.mark.parametrize("kind", sorted(name for name, kind in KINDS.items() if kind.how in ("virtual", "prefix")))
def test_settings_of_virtual_tokens_are_of_training_or_shapes(kind: str) -> None:
    """The file has what they result in."""
    assert fields_of(kind) <= {"modules_to_save"}


@pytest.mark.parametrize(("kind", "name"), REFUSED)
def test_other_settings_are_rejected_and_named(kind: str, name: str) -> None:
    with pytest.raises(NotServed, match=f"`{name}`"):
        configuration.served({"peft_type": kind, "r": 4, "lora_alpha": 8, name: REFUSED[kind, name]})


@pytest.mark.parametrize(("kind", "name"), ELSEWHERE)
def test_some_are_compared_elsewhere(kind: str, name: str) -> None:
    assert name in (Path(__file__).parents[3] / ELSEWHERE[kind, name]).read_text()


@pytest.mark.parametrize(
    ("kind", "name"), [case if case in OFTEN else pytest.param(*case, marks=pytest.mark.long) for case in CASES]
)
def test_a_setting_computes_what_peft_computes(kind: str, name: str, base: Path, tmp_path: Path) -> None:
    settings = (MODULES | VALUES.get(kind, {}))[name]
    adapter = kinds.make(kind, base, tmp_path / "adapter", **settings)
    reader, facts = making.make_reader(base)
    expected = making.of_peft(base, adapter)
    served = making.lay_out(reader, facts, adapter)
    torch.testing.assert_close(making.of_layout(base, served), expected, rtol=1e-4, atol=1e-4)


def test_chosen_vectors_that_do_not_exist_are_rejected(base: Path, tmp_path: Path) -> None:
    """VB-LoRA saves their numbers in a byte each."""
    adapter = kinds.make("VBLORA", base, tmp_path / "adapter", save_only_topk_weights=True)
    weights = adapter / "adapter_model.safetensors"
    tensors = load_file(weights)
    assert torch.uint8 in {tensor.dtype for tensor in tensors.values()}
    wrong = {
        key: torch.full_like(tensor, 250) if key.endswith("indices") else tensor for key, tensor in tensors.items()
    }
    save_file(wrong, weights)
    reader, facts = making.make_reader(base)
    with pytest.raises(AdapterInvalid):
        making.lay_out(reader, facts, adapter)
