"""Mirrors LMFlow's `speculative_inference.py` on a Lorikeet server: its flags, its prompt loop.

    python examples/speculative_inference.py --model gpt2-xl --draft_model gpt2 --gamma 5 --temperature 0.3

Run it in an environment with Lorikeet installed. It reads prompts until the end of input and streams each with its
continuation. Without models it serves the built-in demo models. `--gpu 0` selects that CUDA device; the default is the
first one, or the CPU.
"""

import argparse
import sys
from importlib.resources import files
from typing import Any

from lorikeet.launcher import Client, launch
from lorikeet.launcher.cli.client import ServerError

PROMPT = "Speculative Inference: "


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Continue prompts with a draft model.")
    parser.add_argument("--gpu", default="", help="number of the CUDA device")
    parser.add_argument("--model", default=str(files("lorikeet.demo") / "base"))
    parser.add_argument("--draft_model", default=str(files("lorikeet.demo") / "draft"))
    parser.add_argument("--gamma", type=int, default=5, help="draft tokens per step")
    parser.add_argument("--max_new_tokens", type=int, default=512)
    parser.add_argument("--temperature", type=float, default=0.3, help="0 selects the most likely token")
    parser.add_argument("--ignore_eos", action="store_true", help="always generate max_new_tokens, like LMFlow")
    parser.add_argument("--set", action="append", default=[], metavar="FLAG=VALUE", help="any flag of the launcher")
    return parser.parse_args(arguments)


def answer(client: Client, prompt: str, options: argparse.Namespace) -> None:
    """Print the prompt, its continuation, and the number of accepted draft tokens."""
    print(prompt, end="")
    parameters: dict[str, Any] = {"speculative_method": "draft", "speculative_schedule": "constant"}
    if options.temperature > 1e-6:
        parameters |= {"do_sample": True, "temperature": options.temperature}
    stream = client.stream(
        prompt, max_new_tokens=options.max_new_tokens, ignore_eos_token=options.ignore_eos, **parameters
    )
    for token in stream:
        if options.ignore_eos or not token.special:
            print(token.text, end="", flush=True)
    report = stream.details["speculation"]
    rate = f"{report['accepted']} of {report['drafted']} draft tokens accepted"
    print(f"\n[{stream.details['generated_tokens']} tokens in {report['steps']} forward passes, {rate}]")


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    flags: dict[str, Any] = dict(one.split("=", 1) for one in options.set)
    flags |= {"device": f"cuda:{options.gpu}"} if options.gpu else {}
    flags |= {"speculative_tokens": options.gamma, "speculative_tokens_max": max(options.gamma, 16)}
    with launch(options.model, options.draft_model, **flags) as client:
        print(PROMPT, end="", flush=True)
        for line in sys.stdin:
            try:
                answer(client, line.rstrip("\n"), options)
            except ServerError as error:  # concerns this prompt only
                print(f"\n[{error}]")
            print(PROMPT, end="", flush=True)
    print()


if __name__ == "__main__":
    main()
