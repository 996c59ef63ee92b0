"""Quantization methods: their names in flags, configurations and on the wire, the packages that they need, and which
one a checkpoint uses. Imports none of the packages.
"""

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_AFTER_SAMPLES = (
    "it is computed from sample texts in advance, not at startup: use a checkpoint that is quantised by it, or "
    "bitsandbytes-nf4 or hqq-4bit, which quantise any model"
)
_NO_HQQ_FILES = "transformers 5 does not read such checkpoints: use the plain model, which is quantised at startup"
_NO_FP8_FILES = (
    "transformers downloads the kernels for them from the hub while serving: use the plain model with --quantize fp8"
)
_NO_GGUF_FLAG = "give a .gguf file as the model, without --quantize"
_EETQ = "its kernels are downloaded from the hub while serving: use bitsandbytes or fp8 for 8 bits"
_EXL2 = "transformers has no loader for it: use gptq or awq checkpoints, or hqq for 2, 3 and 4 bits"


@dataclass(frozen=True)
class QuantizationMethod:
    """One quantization method."""

    packages: tuple[str, ...] = ()
    """Required packages."""
    extra: str = ""
    """Our extra that installs them."""
    refused: str = ""
    """Why it is not supported, if it is not."""
    refused_at_load: str = ""
    """Why plain weights cannot be quantised by it, if they cannot."""
    refused_in_files: str = ""
    """Why checkpoints that are quantised by it are not supported, if they are not."""


INTEGERS = {"int8": (8, 32), "int4": (4, 128), "int4-g32": (4, 32)}
"""Methods of ours, which round plain weights to so many bits, so many weights of a row with one scale."""
ROUNDING = (*INTEGERS, "gguf", "bitsandbytes")
"""Methods whose weights are integers, so that activations are rounded on CPU."""
PACKED = ("gptq", "awq")
"""Methods whose checkpoints are multiplied as integers if their layout allows it."""
_LEAST_GROUP = 32
GGUF_KEY, GGUF_NAME = "lorikeet_gguf", "model.gguf"
"""In config.json: the name of the `.gguf` file that has the weights. Every folder made for such a file has the same."""
FP8_KV = "fp8-kv"
"""Not a method for weights, though a value of `--quantize`: LoRAX's name for a KV cache in fp8."""
_BITSANDBYTES = QuantizationMethod(("bitsandbytes",), "bitsandbytes")
_HQQ = QuantizationMethod(("hqq",), "hqq", refused_in_files=_NO_HQQ_FILES)
METHODS = {
    **dict.fromkeys(INTEGERS, QuantizationMethod(refused_in_files="there is no such checkpoint format")),
    "bitsandbytes": _BITSANDBYTES,
    "bitsandbytes-nf4": _BITSANDBYTES,
    "bitsandbytes-fp4": _BITSANDBYTES,
    "gptq": QuantizationMethod(("gptqmodel", "optimum"), "gptq", refused_at_load=_AFTER_SAMPLES),
    "awq": QuantizationMethod(("gptqmodel",), "gptq", refused_at_load=_AFTER_SAMPLES),
    "gguf": QuantizationMethod(("gguf",), refused_at_load=_NO_GGUF_FLAG),
    "eetq": QuantizationMethod(refused=_EETQ),
    "exl2": QuantizationMethod(refused=_EXL2),
    "fp8": QuantizationMethod(("torchao",), "torchao", refused_in_files=_NO_FP8_FILES),
    FP8_KV: QuantizationMethod(),
    "hqq-4bit": _HQQ,
    "hqq-3bit": _HQQ,
    "hqq-2bit": _HQQ,
}


def reason_against(name: str) -> str:
    """Why this installation cannot serve weights quantised by `name`; empty if it can."""
    method = METHODS.get(name)
    if method is None:
        return "it is an unknown method"
    if method.refused:
        return method.refused
    missing = [package for package in method.packages if importlib.util.find_spec(package) is None]
    if missing:
        return f"it needs the package {' and '.join(missing)}: pip install 'lorikeet-serve[{method.extra}]'"
    return ""


def reason_against_integers(config: Mapping[str, Any]) -> str:
    """Why matrices of a GPTQ or AWQ checkpoint cannot be multiplied as integers; empty if they can. Reading them may
    find another reason, which config.json does not tell.
    """
    settings = config["quantization_config"]
    bits = settings.get("bits", settings.get("w_bit"))
    group = settings.get("group_size", settings.get("q_group_size"))
    if bits != 4:
        return f"its weights have {bits} bits"
    if not isinstance(group, int) or (group != -1 and group % _LEAST_GROUP):
        return f"its group size {group} is not a multiple of {_LEAST_GROUP}"
    if settings.get("desc_act"):
        return "its columns are reordered across groups (desc_act)"
    if settings.get("dynamic"):
        return "its layers have different settings (dynamic)"
    layout = settings.get("version", "gemm") if settings["quant_method"] == "awq" else settings.get("checkpoint_format")
    if str(layout).lower() not in ("none", "gemm", "gptq", "gptq_v2"):
        return f"its layout is {layout}"
    return ""


def multiplies_integers(name: str | None, config: Mapping[str, Any]) -> bool:
    """Whether weights of a method are kept and multiplied as integers by our kernels."""
    is_packed = name in PACKED and of_checkpoint(config) == name
    return name in ROUNDING or (is_packed and not reason_against_integers(config))


def activations_of(is_integers: bool, chosen: str | None, device: str) -> str:
    """What activations of a method are rounded to, from `--quantize-activations`: `int8` or `none`. `is_integers`:
    whether weights are multiplied as integers. Raises ValueError if that leaves no choice.
    """
    if chosen is not None and not is_integers:
        raise ValueError(
            f"only {', '.join(ROUNDING)}, and checkpoints of {' and '.join(PACKED)} whose layout allows it, can choose "
            "how activations are rounded"
        )
    if not device.startswith("cpu"):
        if chosen == "int8":
            raise ValueError(f"8-bit activations are supported on CPU only, not on {device}")
        return "none"
    return chosen or "int8" if is_integers else "none"


def describe(name: str | None, activations: str) -> str:
    """What receipts say: the method, and its activations if they are not as usual."""
    usual = "int8" if name in ROUNDING else "none"
    return name or "" if activations == usual else f"{name}, activations {activations}"


def of_weights(method: str | None) -> str | None:
    """The weights' method in a value of `--quantize`."""
    return None if method == FP8_KV else method


def of_checkpoint(config: Mapping[str, Any]) -> str | None:
    """The quantization method in a config.json, by the name of our flag if it has one; None for plain weights."""
    if config.get(GGUF_KEY):
        return "gguf"
    settings = config.get("quantization_config")
    if not isinstance(settings, Mapping):
        return None
    if settings.get("load_in_8bit"):
        return "bitsandbytes"
    if settings.get("load_in_4bit"):
        return f"bitsandbytes-{settings.get('bnb_4bit_quant_type', 'fp4')}"
    name = str(settings.get("quant_method"))
    if name == "hqq":
        asked = settings.get("quant_config") or {}
        return f"hqq-{asked.get('weight_quant_params', {}).get('nbits', 4)}bit"
    return name


def choose(name: str | None, config: Mapping[str, Any]) -> str | None:
    """The method that weights are served with, from the flag and config.json. Raises ValueError with a reason."""
    own, flag = of_checkpoint(config), of_weights(name)
    if own is not None and flag is not None and own != flag:
        raise ValueError(f"its weights are quantised by {own} already, and {flag} was asked for")
    chosen = own or flag
    if chosen is None:
        return None
    row = METHODS.get(chosen, QuantizationMethod())
    reason = row.refused_at_load if own is None else row.refused_in_files
    if not reason and not (chosen in PACKED and multiplies_integers(chosen, config)):
        reason = reason_against(chosen)
        if reason and chosen in PACKED:
            reason = f"it is not multiplied as integers, because {reason_against_integers(config)}; so {reason}"
    if reason:
        raise ValueError(f"quantised by {chosen}: {reason}")
    return chosen
