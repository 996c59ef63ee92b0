"""Our server against transformers' own continuous batching on the same prompts, one after the other in every round.

transformers runs in a process of its own (this module as a program). It reads lines with a JSON list of prompts, and
answers each with a JSON object.
"""

import contextlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.evidence import arguments
from benchmarks.evidence.figure import Case, Cases, Raw
from benchmarks.load import completions, peers, servers
from benchmarks.load.rounds import EXTRA, LENGTH, OURS
from benchmarks.models.limit import OUTPUT_TOKENS, PROMPT_TOKENS
from benchmarks.models.prompts import prompts

ROUNDS = 8
REQUESTS = 8
SEED = 13_000
ATTENTION = "sdpa"


def measure(rounds: int = ROUNDS) -> Cases:
    """One case per round."""
    model = peers.model_folder()
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(servers.running(OURS, servers.lorikeet(model)))
        peer = stack.enter_context(_worker(model))
        target = completions.Endpoint(server.port, str(model), EXTRA[OURS])
        _ask(peer, prompts(2, PROMPT_TOKENS, SEED))
        uvloop.run(completions.closed_loop(target, prompts(2, PROMPT_TOKENS, SEED), 2, LENGTH))
        for number in range(rounds):
            texts = prompts(REQUESTS, PROMPT_TOKENS, SEED + 1 + number)
            answers = uvloop.run(completions.closed_loop(target, texts, REQUESTS, LENGTH))
            theirs = _ask(peer, texts)
            errors = [answer.error for answer in answers if answer.error]
            if theirs["counts"] != [OUTPUT_TOKENS] * REQUESTS:
                errors.append(f"transformers generated {theirs['counts']} tokens")
            raw = {
                OURS: 0.0 if errors else round(completions.tokens_per_second(answers), 3),
                "transformers": round(sum(theirs["counts"]) / theirs["seconds"], 3),
                "first_token_s": 0.0 if errors else round(statistics.median(a.first_token_s for a in answers), 4),
            }
            yield Case(f"round {number}", raw, "; ".join(errors[:3]))


def over_transformers(raw: Raw) -> float:
    return float(raw[OURS] / raw["transformers"])


@contextlib.contextmanager
def _worker(model: Path) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-m", "benchmarks.serving.transformers_peer", str(model)]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, cwd=servers.REPOSITORY, stdin=pipe, stdout=pipe, text=True)
    try:
        assert process.stdout is not None
        process.stdout.readline()  # it is ready
        yield process
    finally:
        process.kill()
        process.wait()


def _ask(process: "subprocess.Popen[str]", texts: list[str]) -> dict[str, Any]:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(json.dumps(texts) + "\n")
    process.stdin.flush()
    answer: dict[str, Any] = json.loads(process.stdout.readline())
    return answer


def work(folder: str) -> None:
    """The worker: `generate_batch` for every line of prompts."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation=ATTENTION)
    model.eval()
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        ids = [tokenizer(text)["input_ids"] for text in json.loads(line)]
        counts, seconds = generated(model, ids, OUTPUT_TOKENS)
        print(json.dumps({"counts": counts, "seconds": seconds}), flush=True)


def generated(model: Any, ids: list[list[int]], num_tokens: int, **memory: Any) -> tuple[list[int], float]:
    """How many tokens transformers generates for each prompt, and the seconds of all. Its settings are the defaults,
    but for sharing prefixes, which no two prompts have.
    """
    from transformers import GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    generation = GenerationConfig(max_new_tokens=num_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
    batching = ContinuousBatchingConfig(allow_block_sharing=False, **memory)
    start = time.monotonic()
    outputs = model.generate_batch(
        ids, generation_config=generation, continuous_batching_config=batching, progress_bar=False
    )
    seconds = time.monotonic() - start
    return [len(output.generated_tokens) for output in outputs.values()], seconds


if __name__ == "__main__":
    parser = arguments.parser(__doc__)
    parser.add_argument("worker", metavar="MODEL", help="folder of the model")
    work(parser.parse_args().worker)
