"""What a base can be quantised by: the methods' names, as flags, configurations and the wire have them, the packages
that they need, and what a checkpoint's configuration says of itself. Imports none of the packages.
"""

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_CUDA_ONLY = "its kernels run on CUDA only, and have not been tried here"
_THROUGH_GPTQMODEL = (
    "transformers reads it through the package gptqmodel, whose releases need a torch that this version has not been "
    "tried with"
)
_NO_HQQ = "transformers reads no such weights since its version 5"


@dataclass(frozen=True)
class Method:
    """One way of quantising."""

    package: str = ""
    """What must be installed; its name is that of our extra, too."""
    refused: str = ""
    """Why it is not served, "" where it is."""


FP8_KV = "fp8-kv"
"""No method for weights, though `--quantize` takes it: LoRAX's name for a KV cache in fp8."""
METHODS = {
    "bitsandbytes": Method("bitsandbytes"),
    "bitsandbytes-nf4": Method("bitsandbytes"),
    "bitsandbytes-fp4": Method("bitsandbytes"),
    "gptq": Method(refused=_THROUGH_GPTQMODEL),
    "awq": Method(refused=_THROUGH_GPTQMODEL),
    "eetq": Method(refused=_CUDA_ONLY),
    "exl2": Method(refused="transformers has no loader for it"),
    "fp8": Method(refused=_CUDA_ONLY),
    FP8_KV: Method(),
    "hqq-4bit": Method(refused=_NO_HQQ),
    "hqq-3bit": Method(refused=_NO_HQQ),
    "hqq-2bit": Method(refused=_NO_HQQ),
}


def reason_against(name: str) -> str:
    """Why weights quantised by `name` cannot be served by this installation; "" where they can."""
    method = METHODS.get(name)
    if method is None:
        return "it is not known here"
    if method.refused:
        return method.refused
    if method.package and importlib.util.find_spec(method.package) is None:
        return f"it needs the package {method.package}: pip install 'lorikeet[{method.package}]'"
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
    if chosen is not None and (reason := reason_against(chosen)):
        raise ValueError(f"quantised by {chosen}: {reason}")
    return chosen
