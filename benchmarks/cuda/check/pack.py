"""Gathers what a machine with a card and without network needs to check it: wheels for its Python, and kernels that are
compiled already. With this tree they are at most 60 MiB.

    python -m benchmarks.cuda.check.pack [--python 3.12] [--architecture 90] [--no-kernels]

Wheels of this environment's versions go to .whl/, the kernels to .gpu-check/triton.tar.xz. Compiled kernels serve the
same version of Triton alone; others are compiled on the machine. There, in a copy of this folder,
`sh benchmarks/cuda/check/packed.sh` installs the wheels and runs the check.
"""

import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from benchmarks.evidence import arguments

ROOT = Path(__file__).parents[3]
WHEELS, KERNELS = ROOT / ".whl", ROOT / ".gpu-check" / "triton.tar.xz"
CACHE = Path("/tmp/gpu-check-triton")
"""Triton's cache, where packed.sh has it too: some of its files hold absolute paths."""
MOST_BYTES = 60 << 20
DISTRIBUTION = "lorikeet-serve"
INCLUDED = frozenset({
    "torch", "triton", "transformers", "peft", "safetensors", "tokenizers", "sentencepiece", "jinja2", "numpy", "httpx",
    "huggingface-hub", "pyyaml", "uvloop", "prometheus-client", "rich", "packaging", "tqdm", "requests", "click", "h11",
    "anyio", "sniffio", "idna", "certifi", "markupsafe", "psutil", "accelerate", "regex", "filelock", "fsspec",
})  # fmt: skip
"""What a machine that runs transformers on torch for CUDA has: these and what they need are not gathered."""
PLATFORMS = ("manylinux_2_31_x86_64", "manylinux_2_28_x86_64", "manylinux2014_x86_64")
COMPILED = (".cubin", ".json")
"""What Triton reads when a kernel is compiled already."""


def needed(distribution: str = DISTRIBUTION) -> dict[str, str]:
    """Name and version of what a distribution needs in this environment, INCLUDED left out."""
    versions: dict[str, str] = {}
    names = [distribution]
    while names:
        for line in metadata.requires(names.pop()) or ():
            requirement = Requirement(line)
            name = canonicalize_name(requirement.name)
            is_asked = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            if is_asked and name not in INCLUDED and name not in versions:
                versions[name] = metadata.version(name)
                names.append(name)
    return versions


def gather(folder: Path, python: str, versions: dict[str, str]) -> None:
    """Download the wheels of these versions into an emptied folder."""
    shutil.rmtree(folder, ignore_errors=True)
    platforms = [f"--platform={name}" for name in PLATFORMS]
    pinned = [f"{name}=={version}" for name, version in sorted(versions.items())]
    where = [f"--python-version={python}", *platforms, f"--dest={folder}"]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    subprocess.run([*pip, "download", "--no-deps", "--only-binary=:all:", *where, *pinned], check=True)


def compile_kernels(archive: Path, architecture: int) -> None:
    """Compile for an architecture."""
    command = [sys.executable, "-m", "benchmarks.cuda.check.warm", "--architecture", str(architecture)]
    environment = os.environ | {"TRITON_CACHE_DIR": str(CACHE), "TRITON_INTERPRET": "0"}
    shutil.rmtree(CACHE, ignore_errors=True)
    subprocess.run(command, check=True, cwd=ROOT, env=environment)
    archive.parent.mkdir(exist_ok=True)
    pack_kernels(CACHE, archive)


def pack_kernels(cache: Path, archive: Path) -> None:
    with tarfile.open(archive, "w:xz") as packed:
        for path in sorted(path for path in cache.rglob("*") if path.suffix in COMPILED):
            packed.add(path, path.relative_to(cache))


def num_bytes(paths: Iterable[Path]) -> int:
    return sum(path.stat().st_size for path in paths if path.is_file() and not path.is_symlink())


def tree() -> list[Path]:
    """The files that git keeps."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in listed.split("\0") if name]


def main(given: Sequence[str] | None = None) -> int:
    parser = arguments.parser(__doc__)
    parser.add_argument("--python", default="3.12", help="version of Python on the machine")
    parser.add_argument("--architecture", type=int, default=90, help="10 times the card's compute capability")
    parser.add_argument("--no-kernels", action="store_true", help="leave their compilation to the machine")
    options = parser.parse_args(given)
    gather(WHEELS, options.python, needed())
    if not options.no_kernels:
        compile_kernels(KERNELS, options.architecture)
    sizes = {"tree": num_bytes(tree()), "wheels": num_bytes(WHEELS.iterdir()), "kernels": num_bytes([KERNELS])}
    total = sum(sizes.values())
    print(", ".join(f"{name} {size / (1 << 20):.1f}" for name, size in sizes.items()), f"= {total / (1 << 20):.1f} MiB")
    if total > MOST_BYTES:
        print(f"that is more than {MOST_BYTES >> 20} MiB: leave out files, or copy them apart", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
