"""What a base can be quantised by: the methods' names, as flags, configurations and the wire have them, the packages
that they need, and what a checkpoint's configuration says of itself. Imports none of the packages.
"""

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_AFTER_SAMPLES = (
    "it is computed from sample texts beforehand, never at a start: name a checkpoint that is quantised so, or take "
    "bitsandbytes-nf4 or hqq-4bit, which quantise any"
)
_NO_HQQ_FILES = (
    "transformers reads no such checkpoints since its version 5: name the plain model, which is quantised at the start"
)
_NO_FP8_FILES = (
    "transformers' layers for them compute by kernels that are fetched from the hub while serving: name the plain "
    "model and --quantize fp8"
)
_EETQ = "its kernels are fetched from the hub while serving: bitsandbytes and fp8 have 8 bits too"
_EXL2 = "transformers has no loader for it: gptq and awq checkpoints are served, hqq has 2, 3 and 4 bits"


@dataclass(frozen=True)
class Method:
    """One way of quantising."""

    packages: tuple[str, ...] = ()
    """What must be installed."""
    extra: str = ""
    """Our extra that brings them."""
    refused: str = ""
    """Why it is not served, "" where it is."""
    refused_at_load: str = ""
    """Why weights that are not quantised yet are not quantised by it, "" where they are."""
    refused_in_files: str = ""
    """Why checkpoints that are quantised by it are not served, "" where they are."""


FP8_KV = "fp8-kv"
"""No method for weights, though `--quantize` takes it: LoRAX's name for a KV cache in fp8."""
_BITSANDBYTES = Method(("bitsandbytes",), "bitsandbytes")
_HQQ = Method(("hqq",), "hqq", refused_in_files=_NO_HQQ_FILES)
METHODS = {
    "bitsandbytes": _BITSANDBYTES,
    "bitsandbytes-nf4": _BITSANDBYTES,
    "bitsandbytes-fp4": _BITSANDBYTES,
    "gptq": Method(("gptqmodel", "optimum"), "gptq", refused_at_load=_AFTER_SAMPLES),
    "awq": Method(("gptqmodel",), "gptq", refused_at_load=_AFTER_SAMPLES),
    "eetq": Method(refused=_EETQ),
    "exl2": Method(refused=_EXL2),
    "fp8": Method(("torchao",), "torchao", refused_in_files=_NO_FP8_FILES),
    FP8_KV: Method(),
    "hqq-4bit": _HQQ,
    "hqq-3bit": _HQQ,
    "hqq-2bit": _HQQ,
}


def reason_against(name: str) -> str:
    """Why weights quantised by `name` cannot be served by this installation; "" where they can."""
    method = METHODS.get(name)
    if method is None:
        return "it is not known here"
    if method.refused:
        return method.refused
    missing = [package for package in method.packages if importlib.util.find_spec(package) is None]
    if missing:
        return f"it needs the package {' and '.join(missing)}: pip install 'lorikeet-serve[{method.extra}]'"
    return ""


def of_weights(wanted: str | None) -> str | None:
    """What a value of `--quantize` asks of the weights."""
    return None if wanted == FP8_KV else wanted


def of_checkpoint(config: Mapping[str, Any]) -> str | None:
    """What the weights beside a config.json are quantised by; None where they are not. Where no flag names the method,
    what the file calls it.
    """
    told = config.get("quantization_config")
    if not isinstance(told, Mapping):
        return None
    if told.get("load_in_8bit"):
        return "bitsandbytes"
    if told.get("load_in_4bit"):
        return f"bitsandbytes-{told.get('bnb_4bit_quant_type', 'fp4')}"
    name = str(told.get("quant_method"))
    if name == "hqq":
        asked = told.get("quant_config") or {}
        return f"hqq-{asked.get('weight_quant_params', {}).get('nbits', 4)}bit"
    return name


def choose(wanted: str | None, config: Mapping[str, Any]) -> str | None:
    """What the weights beside a config.json are served as, by what was asked for. Raises ValueError with a reason."""
    own, wanted = of_checkpoint(config), of_weights(wanted)
    if own is not None and wanted is not None and own != wanted:
        raise ValueError(f"its weights are quantised by {own} already, and {wanted} was asked for")
    chosen = own or wanted
    if chosen is None:
        return None
    method = METHODS.get(chosen, Method())
    reason = method.refused_at_load if own is None else method.refused_in_files
    if reason := reason or reason_against(chosen):
        raise ValueError(f"quantised by {chosen}: {reason}")
    return chosen
