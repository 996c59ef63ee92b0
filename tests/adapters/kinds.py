"""One adapter of each kind that PEFT writes, for tiny models: how it is configured, and values as after training."""

import dataclasses
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import torch
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from peft.tuners.lora.config import BdLoraConfig, KasaConfig, MontecloraConfig, VeloraConfig

from tests.adapters import making

ATTENTION = ["q_proj", "v_proj"]
TARGETS = [*ATTENTION, "down_proj"]
TOKENS = [5, 9, 70]


def _lora(**settings: Any) -> peft.LoraConfig:
    return peft.LoraConfig(r=4, lora_alpha=8, target_modules=TARGETS, **settings)


CONFIGS: dict[str, Callable[[], peft.PeftConfig]] = {
    "LORA": _lora,
    "DoRA": lambda: _lora(use_dora=True),
    "LoRA-GA": lambda: _lora(init_lora_weights="lora_ga", lora_ga_config=peft.LoraGAConfig()),
    "EVA": lambda: _lora(init_lora_weights="eva", eva_config=peft.EvaConfig()),
    "MiCA": lambda: _lora(init_lora_weights="mica"),
    "VeLoRA": lambda: _lora(velora_config=VeloraConfig()),
    "MonteCLoRA": lambda: _lora(monteclora_config=MontecloraConfig()),
    "QALoRA": lambda: _lora(use_qalora=True, qalora_group_size=8),
    "BD-LoRA": lambda: _lora(
        use_bdlora=BdLoraConfig(nblocks=2, target_modules_bd_a=ATTENTION, target_modules_bd_b=["down_proj"])
    ),
    "KaSA": lambda: _lora(kasa_config=KasaConfig()),
    "trained tokens": lambda: _lora(trainable_token_indices=TOKENS),
    "whole ends": lambda: _lora(modules_to_save=["embed_tokens", "lm_head"]),
    "whole embedding": lambda: _lora(modules_to_save=["embed_tokens"]),
    "whole norms": lambda: _lora(modules_to_save=["input_layernorm", "norm"]),
    "LN_TUNING": peft.LNTuningConfig,
    "TRAINABLE_TOKENS": lambda: peft.TrainableTokensConfig(token_indices=TOKENS),
    "IA3": peft.IA3Config,
    "ADALORA": lambda: peft.AdaLoraConfig(target_modules=TARGETS, init_r=6, total_step=100),
    "BEFT": lambda: peft.BeftConfig(target_modules=TARGETS),
    "BOFT": lambda: peft.BOFTConfig(target_modules=TARGETS, boft_block_size=4),
    "C3A": lambda: peft.C3AConfig(target_modules=TARGETS, block_size=16),
    "DEFT": lambda: peft.DeftConfig(target_modules=TARGETS),
    "DELORA": lambda: peft.DeloraConfig(target_modules=TARGETS),
    "FOURIERFT": lambda: peft.FourierFTConfig(target_modules=TARGETS, n_frequency=50),
    "FROD": lambda: peft.FrodConfig(target_modules=TARGETS),
    "GLORA": lambda: peft.GloraConfig(target_modules=TARGETS),
    "GRALORA": lambda: peft.GraloraConfig(target_modules=TARGETS, r=8, gralora_k=2),
    "HIRA": lambda: peft.HiraConfig(target_modules=TARGETS),
    "HRA": lambda: peft.HRAConfig(target_modules=TARGETS),
    "LOHA": lambda: peft.LoHaConfig(target_modules=TARGETS, r=2),
    "LOKR": lambda: peft.LoKrConfig(target_modules=TARGETS, r=4),
    "MISS": lambda: peft.MissConfig(target_modules=TARGETS, r=4),
    "MiSS, mini": lambda: peft.MissConfig(target_modules=TARGETS, r=8, init_weights="mini", mini_r=4),
    "OFT": lambda: peft.OFTConfig(target_modules=TARGETS, r=0, oft_block_size=8),
    "OSF": lambda: peft.OSFConfig(target_modules=TARGETS),
    "PEANUT": lambda: peft.PeanutConfig(target_modules=TARGETS),
    "PSOFT": lambda: peft.PsoftConfig(target_modules=TARGETS),
    "PVERA": lambda: peft.PveraConfig(target_modules=ATTENTION, r=16),
    "RANDLORA": lambda: peft.RandLoraConfig(target_modules=ATTENTION, r=4, randlora_alpha=40),
    "ROAD": lambda: peft.RoadConfig(target_modules=TARGETS, group_size=16),
    "SHIRA": lambda: peft.ShiraConfig(target_modules=TARGETS, r=2),
    "SUPERTUNING": lambda: PEFT_TYPE_TO_CONFIG_MAPPING["SUPERTUNING"](target_modules=TARGETS),
    "TINYLORA": lambda: peft.TinyLoraConfig(target_modules=TARGETS),
    "UNILORA": lambda: peft.UniLoraConfig(target_modules=TARGETS),
    "VBLORA": lambda: peft.VBLoRAConfig(target_modules=TARGETS, vector_length=8, num_vectors=32),
    "VERA": lambda: peft.VeraConfig(target_modules=ATTENTION, r=16),
    "VeRA without its projection": lambda: peft.VeraConfig(target_modules=ATTENTION, r=16, save_projection=False),
    "WAVEFT": lambda: peft.WaveFTConfig(target_modules=TARGETS, n_frequency=50),
}
"""By type, or by the name of a variant."""
VIRTUAL: dict[str, Callable[[], peft.PeftConfig]] = {
    "PROMPT_TUNING": lambda: peft.PromptTuningConfig(num_virtual_tokens=20, prompt_tuning_init="RANDOM"),
    "P_TUNING": lambda: peft.PromptEncoderConfig(num_virtual_tokens=7, encoder_hidden_size=32),
    "CPT": lambda: peft.CPTConfig(
        cpt_token_ids=[5, 9, 70, 8], cpt_mask=[1] * 4, cpt_tokens_type_mask=[1, 2, 3, 4], task_type="CAUSAL_LM"
    ),
    "MULTITASK_PROMPT_TUNING": lambda: peft.MultitaskPromptTuningConfig(num_virtual_tokens=6, num_ranks=2),
}
"""Types with virtual tokens before the prompt."""
PREFIXES: dict[str, Callable[[], peft.PeftConfig]] = {
    "PREFIX_TUNING": lambda: peft.PrefixTuningConfig(num_virtual_tokens=9),
    "CARTRIDGE": lambda: peft.CartridgeConfig(num_virtual_tokens=35, num_frozen_tokens=1),
}
"""Types with keys and values before those of the prompt."""
_STEP = 0.1
"""Standard deviation of what training adds."""


def make(name: str, base: Path, folder: Path, seed: int = 3, **settings: Any) -> Path:
    """Have PEFT save the adapter, with other `settings` than CONFIGS has. Returns its folder."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT's own
        config = (CONFIGS | VIRTUAL | PREFIXES)[name]()
        if settings:
            given = {field.name: getattr(config, field.name) for field in dataclasses.fields(config) if field.init}
            config = type(config)(**given | settings)
        config.task_type = "CAUSAL_LM"
        torch.manual_seed(seed)
        model = peft.get_peft_model(making.load_base(base), config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad and parameter.is_floating_point():
                    parameter.add_(_STEP * torch.randn_like(parameter))
        model.save_pretrained(folder)
    return folder
