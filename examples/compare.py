"""Mirrors `python main.py` of LLMSpeculativeSampling on Lorikeet servers: its flags, its four texts, its `-v`.

    python examples/compare.py --input "def add(a, b):" --target_model_name T --approx_model_name D -v

Run it in an environment with Lorikeet installed; the default models are the built-in demo models. It prints the
target's text, the small model's, and the target's with the speculative decoding of both papers (Chen et al. 2023,
Leviathan et al. 2023). With a seed the last two equal the first, token by token, because output depends on the seed
only. `-b` measures tokens per second.
"""

import argparse
import time
from contextlib import ExitStack
from importlib.resources import files
from typing import Any

from lorikeet.launcher import Client, launch
from lorikeet.launcher.cli import generate

SAMPLING = {"do_sample": True, "temperature": 1.0, "top_k": 20, "top_p": 0.9}
RUNS = 10


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Generate four texts for one prompt.")
    parser.add_argument("--input", default="def read_lines(path):\n")
    parser.add_argument("--approx_model_name", default=str(files("lorikeet.demo") / "draft"))
    parser.add_argument("--target_model_name", default=str(files("lorikeet.demo") / "base"))
    parser.add_argument("-v", "--verbose", action="store_true", help="colour tokens by their source, and count them")
    parser.add_argument("-s", "--seed", type=int)
    parser.add_argument("-b", "--benchmark", action="store_true", help=f"measure tokens per second over {RUNS} runs")
    parser.add_argument("-p", "--profiling", action="store_true", help="print seconds by part; the same line as -v")
    parser.add_argument("-M", "--max_tokens", type=int, default=20)
    parser.add_argument("-g", "--gamma", type=int, default=4)
    parser.add_argument("--set", action="append", default=[], metavar="FLAG=VALUE", help="any flag of the launcher")
    return parser.parse_args(arguments)


def show(title: str, client: Client, options: argparse.Namespace, **parameters: Any) -> None:
    """Print one text under its title."""
    seed = {} if options.seed is None else {"seed": options.seed}
    parameters = {**SAMPLING, "max_new_tokens": options.max_tokens, **seed, **parameters}
    began = time.monotonic()
    answer = client.generate(options.input, **parameters)
    seconds = time.monotonic() - began
    paint = generate.painter(options.verbose)
    print(f"\x1b[31m{title}\x1b[0m\n{options.input}" + "".join(map(paint, answer.tokens)))
    if options.verbose or options.profiling:
        print(generate.summary(answer.details, seconds))
    if options.benchmark:
        began = time.monotonic()
        texts = [client.generate(options.input, **parameters) for _ in range(RUNS)]
        num_tokens = sum(text.details["generated_tokens"] for text in texts)
        print(f"{num_tokens / (time.monotonic() - began):.1f} tokens/s")


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    flags: dict[str, Any] = dict(one.split("=", 1) for one in options.set)
    width = {"speculative_tokens": options.gamma, "speculative_tokens_max": max(options.gamma, 16)}
    with ExitStack() as both:
        small = both.enter_context(launch(options.approx_model_name, **flags))
        large = both.enter_context(launch(options.target_model_name, options.approx_model_name, **width, **flags))
        show("target model", large, options, speculative_tokens=0)
        show("approximation model", small, options)
        speculation = {"speculative_method": "draft", "speculative_schedule": "constant"}
        show("DeepMind's speculative sampling", large, options, speculative_verification="deepmind", **speculation)
        show("Google's speculative decoding", large, options, speculative_verification="google", **speculation)
        if options.verbose:
            print(generate.legend(colours=True))


if __name__ == "__main__":
    main()
