"""Lorikeet next to llama.cpp's server: closed loops over HTTP on the 200 M Llama, 256 tokens in and 64 out, in
alternating rounds. int8 stands next to Q8_0, int4 next to Q4_0. In another suite eight clients have an adapter each.

`python -m benchmarks.serving.llama_cpp` compiles llama.cpp from the sources that llama-cpp-python has; it needs cmake
and a C++ compiler. llama.cpp computes requests with different adapters one after the other.
"""

import asyncio
import contextlib
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.evidence import arguments
from benchmarks.evidence.figure import Cases, in_rounds
from benchmarks.load import adapted, completions, servers
from benchmarks.load.peers import VENVS
from benchmarks.load.rounds import EXTRA, LENGTH, OURS
from benchmarks.models.prompts import prompts
from benchmarks.models.random_llama import llama_200m
from benchmarks.serving.closed_loop import in_round, run

VERSION = "0.3.36"
"""Version of llama-cpp-python, which has llama.cpp's whole source of that day."""
FOLDER = VENVS / "llama-cpp"
OPTIONS = ("-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DLLAMA_CURL=OFF", "-DLLAMA_BUILD_TESTS=OFF",
           "-DLLAMA_BUILD_EXAMPLES=OFF", "-DLLAMA_OPENSSL=OFF", "-DBUILD_SHARED_LIBS=OFF")  # fmt: skip


def program() -> Path:
    """The server. Raises FileNotFoundError if it was not built."""
    path = FOLDER / "build" / "bin" / "llama-server"
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing: python -m benchmarks.serving.llama_cpp")
    return path


def build() -> None:
    """Fetch the sources and compile the server."""
    sources = FOLDER / "sources"
    if not sources.exists():
        with tempfile.TemporaryDirectory() as folder:
            requirement = f"llama-cpp-python=={VERSION}"
            command = (sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", ":all:", "-d", folder)
            subprocess.run([*command, requirement], check=True)
            (archive,) = Path(folder).glob("*.tar.gz")
            with tarfile.open(archive) as packed:
                packed.extractall(folder, filter="data")
            (unpacked,) = Path(folder).glob("*/vendor/llama.cpp")
            FOLDER.mkdir(parents=True, exist_ok=True)
            unpacked.rename(sources)
    build_folder = str(FOLDER / "build")
    subprocess.run(["cmake", "-S", str(sources), "-B", build_folder, *OPTIONS], check=True)
    subprocess.run(["cmake", "--build", build_folder, "--target", "llama-server", "-j", "2"], check=True)


ROUNDS = 8
REQUESTS_PER_CLIENT = {1: 4, 8: 3, 32: 2}
CLIENTS = 8
"""With adapters."""
LLAMA_CPP = "llama.cpp"
ADAPTED_REQUESTS = {OURS: 3, LLAMA_CPP: 1}
"""Requests of each client. llama.cpp gets fewer: with adapters it takes several times as long per token."""
SEED, ADAPTED_SEED = 41_000, 42_000
PAIRS = {"int8": "Q8_0", "int4": "Q4_0"}
"""Our rounding, and llama.cpp's of about as many bits."""
ADAPTED = {"bfloat16": "BF16", "int8": "Q8_0"}
"""Pairs of rounding with adapters."""
SLOT_TOKENS = 512
"""Context of each of llama.cpp's slots."""
IGNORE_EOS: Mapping[str, Any] = {"ignore_eos": True, "cache_prompt": False}


def llama_cpp(model: Path, clients: int, *flags: str) -> servers.Command:
    """llama.cpp's server with a slot for each client and a thread for each core; all else is its default."""
    address = ("--host", "127.0.0.1", "--port", "{port}")
    slots = ("--parallel", str(clients), "--ctx-size", str(clients * SLOT_TOKENS), "--threads", str(os.cpu_count()))
    return servers.Command((str(program()), "--model", str(model), *address, *slots, "--no-webui", *flags))


def measure(clients: int, rounds: int = ROUNDS) -> Cases:
    """One case per round, after one that warms up: the four servers in turn."""
    model = llama_200m()
    with contextlib.ExitStack() as stack:
        running = {}
        for ours, theirs in PAIRS.items():
            command = servers.lorikeet(model, "--dtype", "bfloat16", "--quantize", ours)
            running[ours] = stack.enter_context(servers.running(f"{OURS}-{ours}", command))
            command = llama_cpp(_file(model, theirs), clients)
            running[theirs] = stack.enter_context(servers.running(f"{LLAMA_CPP}-{theirs}", command))
        extras = {name: EXTRA[OURS] if name in PAIRS else IGNORE_EOS for name in running}
        targets = {
            name: completions.Endpoint(server.port, str(model), extras[name]) for name, server in running.items()
        }
        ask = partial(run, targets, clients, REQUESTS_PER_CLIENT[clients])
        yield from in_rounds(rounds, lambda number: in_round(number, running, partial(ask, SEED + number)))


def adapters(rounds: int = ROUNDS) -> Cases:
    """One case per round: eight adapters of rank 16 on q, k, v and o, in bfloat16 and with int8 and Q8_0."""
    from benchmarks.models import adapter_files

    base = adapted.full()
    folders = adapter_files.make(base.model, base.root, [f"attention-{i}" for i in range(CLIENTS)])
    with contextlib.ExitStack() as stack:
        running = {}
        for ours, theirs in ADAPTED.items():
            flags = () if ours == "bfloat16" else ("--quantize", ours)
            running[ours] = stack.enter_context(adapted.serving(f"{OURS}-{ours}", base, *flags))
            command = _with_adapters(base.model, theirs, folders)
            running[theirs] = stack.enter_context(servers.running(f"{LLAMA_CPP}-{theirs}", command))
        ask = partial(_ask_adapters, running, str(base.model), [folder.name for folder in folders])
        yield from in_rounds(rounds, lambda number: in_round(number, running, partial(ask, number)))


def _file(model: Path, kind: str) -> Path:
    from benchmarks.models.gguf_files import model_file  # gguf

    return model_file(model, kind)


def _with_adapters(model: Path, kind: str, folders: Sequence[Path]) -> servers.Command:
    from benchmarks.models.gguf_files import adapter_file  # gguf

    files = [flag for folder in folders for flag in ("--lora", str(adapter_file(folder, model)))]
    return llama_cpp(_file(model, kind), len(folders), *files, "--lora-init-without-apply")


def _ask_adapters(
    running: Mapping[str, servers.RunningServer], model: str, adapters: Sequence[str], number: int, name: str
) -> list[completions.TimedCompletion]:
    """A closed loop in which each client asks for its own adapter."""
    is_ours, port = name in ADAPTED, running[name].port
    requests = ADAPTED_REQUESTS[OURS if is_ours else LLAMA_CPP]
    texts = prompts(CLIENTS * requests, LENGTH.num_prompt, ADAPTED_SEED + number)

    async def client(index: int) -> list[completions.TimedCompletion]:
        target = completions.Endpoint(port, model, {**IGNORE_EOS, "lora": [{"id": index, "scale": 1.0}]})
        if is_ours:
            target = completions.Endpoint(port, adapters[index], EXTRA[OURS])
        return [await completions.complete(target, text, LENGTH) for text in texts[index::CLIENTS]]

    async def clients() -> list[completions.TimedCompletion]:
        return [answer for answers in await asyncio.gather(*map(client, range(CLIENTS))) for answer in answers]

    return uvloop.run(clients())


if __name__ == "__main__":
    arguments.parser(__doc__).parse_args()
    build()
