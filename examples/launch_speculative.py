"""Mirrors Xinference's `launch_speculative_llm` on a Lorikeet server: its arguments, then completion, chat and stream.

    python examples/launch_speculative.py --model_name Qwen/Qwen2.5 --model_size_in_billions 7 \\
        --draft_model_name Qwen/Qwen2.5 --draft_model_size_in_billions 3

Run it in an environment with Lorikeet installed. A name is a hub id or a folder; a missing size is appended to it
(`Qwen/Qwen2.5-7B`). Without names it serves the built-in demo models. After each request the acceptance rate of its
draft tokens is printed in the format of Xinference's log.
"""

import argparse
from contextlib import AbstractContextManager
from importlib.resources import files
from typing import Any

from lorikeet.launcher import Client, launch

FLOWER = "def bouquet(flowers):\n"
SPECULATION = {"speculative_method": "draft", "speculative_schedule": "constant"}


def launch_speculative_llm(
    model_name: str,
    model_size_in_billions: float | None,
    quantization: str,
    draft_model_name: str,
    draft_model_size_in_billions: float | None,
    draft_quantization: str,
    n_gpu: int | str | None = "auto",
    **flags: Any,
) -> AbstractContextManager[Client]:
    """Launch a server like Xinference's client; `flags` are those of lorikeet-launcher."""
    return launch(
        _id(model_name, model_size_in_billions),
        _id(draft_model_name, draft_model_size_in_billions),
        quantize=None if quantization == "none" else quantization,
        draft_quantize=None if draft_quantization == "none" else draft_quantization,
        num_shard=None if n_gpu == "auto" else n_gpu,
        **flags,
    )


def _id(name: str, size: float | None) -> str:
    return name if size is None or f"{size:g}b" in name.lower() else f"{name}-{size:g}B"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Serve a model with a draft model.")
    for role, folder in (("", "base"), ("draft_", "draft")):
        parser.add_argument(f"--{role}model_name", default=str(files("lorikeet.demo") / folder))
        parser.add_argument(f"--{role}model_size_in_billions", type=float)
        parser.add_argument(f"--{role}quantization", default="none")
    parser.add_argument("--n_gpu", default="auto")
    parser.add_argument("--set", action="append", default=[], metavar="FLAG=VALUE", help="any flag of the launcher")
    options = vars(parser.parse_args(arguments))
    flags = dict(one.split("=", 1) for one in options.pop("set"))
    with launch_speculative_llm(**options, **flags) as model:
        answer = model.generate(FLOWER, max_new_tokens=64, do_sample=True, temperature=0.7, top_p=0.95, **SPECULATION)
        print(answer.text)
        _log(answer.details["speculation"])
        reply = model.chat("Write a function: Return the length of the list.", max_tokens=64, temperature=0)
        print(reply["choices"][0]["message"]["content"])
        stream = model.stream(FLOWER, max_new_tokens=64, stop=["\n\n"], **SPECULATION)
        print("".join(token.text for token in stream))
        _log(stream.details["speculation"])


def _log(report: dict[str, Any]) -> None:
    accepted, drafted = report["accepted"], report["drafted"]
    rate = f", acceptance rate: {accepted / drafted:.2f}" if drafted else ""
    print(f"In total, {accepted}/{drafted} draft tokens are accepted{rate}")
    print(", ".join(f"{part}: {report[f'{part}_seconds']:.3f} s" for part in ("draft", "verify", "accept")))


if __name__ == "__main__":
    main()
