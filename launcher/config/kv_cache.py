"""What the KV cache keeps numbers in: `--kv-cache-dtype`, or `--quantize fp8-kv`, which is LoRAX's name for it."""

from lorikeet.launcher.config.settings import Settings
from lorikeet.launcher.exits import Exit, LauncherError
from lorikeet.proto.quantization import FP8_KV


def number_format(settings: Settings) -> str:
    """`fp8`, or `auto` for that of the model."""
    return "fp8" if settings["quantize"] == FP8_KV else str(settings["kv-cache-dtype"])


def check(settings: Settings, device: str) -> None:
    """Raise LauncherError where it cannot be kept on `device`."""
    if number_format(settings) == "fp8" and device == "cpu" and not settings["shard-address"]:
        asked = "quantize" if settings["quantize"] == FP8_KV else "kv-cache-dtype"
        raise LauncherError(
            Exit.ARGUMENT_VALIDATION,
            f"{settings.given[asked]} {settings[asked]} is refused on the CPU: only kernels for CUDA keep KV in fp8",
        )
