"""What becomes of each type of adapter that PEFT writes. Imports no torch.

A new type of PEFT is one row here. `folding.py` computes a folded type's change to each module by PEFT's own code.
"""

from dataclasses import dataclass
from typing import Any

CONVERT = "convert it with PEFT's `convert_to_lora`"


@dataclass(frozen=True)
class Kind:
    """How one `peft_type` is served."""

    how: str
    """lora (as its factors), folded (into factors that compute the same), scale (of outputs), norms (their weights),
    tokens (rows of the embedding), virtual (embeddings before the prompt), prefix (keys and values before the prompt),
    or refused.
    """
    reads_base: bool = False
    """Whether its change to a module depends on the module's own weight."""
    reason: str = ""
    """Why it is refused."""


FOLDED, OF_BASE = Kind("folded"), Kind("folded", reads_base=True)


def _refused(reason: str) -> Kind:
    return Kind("refused", reason=reason)


KINDS: dict[str, Kind] = {
    "LORA": Kind("lora"),
    "TRAINABLE_TOKENS": Kind("tokens"),
    "IA3": Kind("scale"),
    **dict.fromkeys(
        ("ADALORA", "BEFT", "C3A", "DELORA", "FOURIERFT", "GRALORA", "LOHA", "LOKR", "PVERA", "RANDLORA", "SHIRA",
         "SUPERTUNING", "UNILORA", "VBLORA", "VERA", "WAVEFT"),
        FOLDED,
    ),
    **dict.fromkeys(
        ("BOFT", "DEFT", "FROD", "GLORA", "HIRA", "HRA", "MISS", "OFT", "OSF", "PEANUT", "PSOFT", "ROAD", "TINYLORA"),
        OF_BASE,
    ),
    "LN_TUNING": Kind("norms"),
    **dict.fromkeys(("PROMPT_TUNING", "P_TUNING", "CPT", "MULTITASK_PROMPT_TUNING"), Kind("virtual")),
    **dict.fromkeys(("PREFIX_TUNING", "CARTRIDGE"), Kind("prefix")),
    "ADAMSS": _refused("PEFT computes it in float32 only, and its factors can be found only in float64"),
    "ADAPTION_PROMPT": _refused("it adds a second attention to the last layers"),
    "LILY": _refused("a router mixes its factors for each token"),
    "POLY": _refused("each request would have to name its tasks (`task_ids`)"),
    "SHADOW": _refused("it runs a second network next to the base"),
    "XLORA": _refused("a classifier mixes its adapters for each token"),
}  # fmt: skip
"""By `peft_type`."""

VARIANTS = {
    "use_qalora": FOLDED,
    "use_bdlora": FOLDED,
    "monteclora_config": FOLDED,
    "velora_config": FOLDED,
    "kasa_config": OF_BASE,
}
"""LoRA's fields whose variant computes something other than the product of its factors."""


def kind_of(values: dict[str, Any]) -> Kind:
    """How a configuration's type and variant are served. Its `peft_type` must be in KINDS."""
    kind = KINDS[str(values["peft_type"]).upper()]
    if kind.how == "folded" and values.get("save_precomputed_indices") is False:
        return OF_BASE  # Supertuning finds the indices in the base's weights again
    variants = [variant for field, variant in VARIANTS.items() if is_set(values.get(field))]
    if kind.how != "lora" or not variants:
        return kind
    return OF_BASE if OF_BASE in variants else FOLDED


def is_set(value: Any) -> bool:
    """Whether a field that chooses a variant has a value. To PEFT, an empty object stands for defaults."""
    return value not in (None, False, [])
