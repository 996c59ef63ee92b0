"""llama.cpp's server, compiled for this machine from the sources that llama-cpp-python carries.

    python -m benchmarks.llama_cpp.build

Needs pip, cmake and a C++ compiler.
"""

import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from benchmarks.evidence import arguments
from benchmarks.load.peers import VENVS

VERSION = "0.3.36"
"""Version of llama-cpp-python, which has llama.cpp's whole source of that day."""
FOLDER = VENVS / "llama-cpp"
OPTIONS = ("-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DLLAMA_CURL=OFF", "-DLLAMA_BUILD_TESTS=OFF",
           "-DLLAMA_BUILD_EXAMPLES=OFF", "-DLLAMA_OPENSSL=OFF", "-DBUILD_SHARED_LIBS=OFF")  # fmt: skip


def program() -> Path:
    """The server. Raises FileNotFoundError where it was not built."""
    found = FOLDER / "build" / "bin" / "llama-server"
    if not found.exists():
        raise FileNotFoundError(f"{found} is missing: python -m benchmarks.llama_cpp.build")
    return found


def build() -> None:
    """Fetch the sources and compile the server."""
    sources = FOLDER / "sources"
    if not sources.exists():
        with tempfile.TemporaryDirectory() as folder:
            wanted = f"llama-cpp-python=={VERSION}"
            command = (sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", ":all:", "-d", folder)
            subprocess.run([*command, wanted], check=True)
            (archive,) = Path(folder).glob("*.tar.gz")
            with tarfile.open(archive) as packed:
                packed.extractall(folder, filter="data")
            (unpacked,) = Path(folder).glob("*/vendor/llama.cpp")
            FOLDER.mkdir(parents=True, exist_ok=True)
            unpacked.rename(sources)
    made = str(FOLDER / "build")
    subprocess.run(["cmake", "-S", str(sources), "-B", made, *OPTIONS], check=True)
    subprocess.run(["cmake", "--build", made, "--target", "llama-server", "-j", "2"], check=True)


if __name__ == "__main__":
    arguments.parser(__doc__).parse_args()
    build()
