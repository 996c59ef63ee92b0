"""`lorikeet-heads`: the command line. Any error ends the command with one sentence and exit code 2.

torch is loaded only after the arguments are validated.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from lorikeet.adapters.errors import HeadsError
from lorikeet.proto import server_url

if TYPE_CHECKING:
    from lorikeet.adapters.medusa.training import TargetOptions

BAD = 2
STOPPED = 130

PROMPTS_HELP = (
    "prompts for the target: .jsonl (per line a string, or an object with `prompt` or `messages`), .json (a list of "
    "such), or any other text file with one prompt per line"
)
URL_HELP = (
    "a running server that generates the texts; without --prompts the target samples prompts. --url alone is the "
    f"variable {server_url.VARIABLE}, else http://127.0.0.1:{server_url.PORT}"
)


class _HeadsParser(argparse.ArgumentParser):
    """Reports an error in one sentence, without the usage."""

    def error(self, message: str) -> NoReturn:
        raise HeadsError(f"{message} (see {self.prog} --help)")


_EXAMPLES = """examples:
  lorikeet-heads train --model-id owner/name --adapter-id you/adapter --prompts prompts.jsonl --out heads
  lorikeet-heads train --model-id owner/name --url http://localhost:3000 --out heads
  lorikeet-heads eval --model-id owner/name --heads heads --prompts prompts.jsonl
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    try:
        options = parser().parse_args(arguments)
        _check(options)
        code: int = options.run(options)
    except HeadsError as error:
        print(f"lorikeet-heads: {error}", file=sys.stderr)
        return BAD
    except KeyboardInterrupt:
        print("lorikeet-heads: stopped; repeat the command to resume", file=sys.stderr)
        return STOPPED
    return code


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = _HeadsParser(
        prog="lorikeet-heads",
        description="Train and evaluate Medusa heads for speculative decoding.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = result.add_subparsers(required=True, metavar="COMMAND", parser_class=_HeadsParser)
    train = commands.add_parser("train", help="generate texts with the target and train heads on them")
    train.set_defaults(run=_train)
    _add_target(train)
    add = train.add_argument
    add("--out", type=Path, required=True, help="folder for the heads, in LoRAX's layout")
    add("--join", action="store_true", help="also copy the adapter's files there: one name for both")
    add("--num-heads", type=_positive, default=3, help="number of heads, each drafts one token (default 3)")
    add("--num-layers", type=_positive, default=1, help="blocks per head (default 1; LoRAX supports 1 only)")
    add("--work", type=Path, help="texts, hidden states, checkpoints; a run resumes from here (OUT.work)")
    add("--epochs", type=_positive, default=4, help="passes over the rows (default 4)")
    add("--lr", type=_above_zero, default=1e-3, help="highest learning rate (default 0.001)")
    add("--rows-per-step", type=_positive, default=1024, help="rows of one step (default 1024)")
    add("--held-out", type=_share, default=0.05, help="share of texts for evaluation (default 0.05)")
    add("--base-name", help="name of the base in config.json (default: as in --model-id)")
    evaluate = commands.add_parser("eval", help="evaluate existing heads on texts that the target generates")
    evaluate.set_defaults(run=_evaluate)
    _add_target(evaluate)
    evaluate.add_argument("--heads", required=True, help="folder or hub id of heads, version 1 or 2, joined or not")
    evaluate.add_argument("--work", type=Path, help="keep the texts here, to resume a stopped run")
    return result


def _add_target(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model-id", required=True, help="base model: folder or hub id")
    add("--adapter-id", help="LoRA adapter of the target: folder or hub id")
    add("--prompts", type=Path, help=PROMPTS_HELP)
    add("--url", nargs="?", const=server_url.default(), help=URL_HELP)
    add("--num-own-prompts", type=_positive, help="number of sampled prompts (default 1000)")
    add("--max-new-tokens", type=_positive, default=256, help="tokens of one text (default 256)")
    add("--batch-size", type=_positive, default=32, help="texts generated at a time (default 32)")
    add("--device", help="cpu, cuda, cuda:1 … (default: cuda if available)")
    dtype_help = "of the model (default: bfloat16 on cuda, float32 on cpu); float32, if given, also for training"
    add("--dtype", choices=["float32", "bfloat16", "float16"], help=dtype_help)
    add("--seed", type=int, default=0)


def _check(options: argparse.Namespace) -> None:
    """What can be checked before anything is loaded; completes the server's URL. Raises HeadsError."""
    prompts, url = options.prompts, options.url
    if prompts is None and url is None:
        raise HeadsError("give --prompts FILE, or --url SERVER for texts from a running server, or both")
    if url is not None:
        try:
            options.url = server_url.normalized(url)
        except ValueError as error:
            raise HeadsError(f"--url: {error}") from None
    if prompts is not None and not prompts.is_file():
        raise HeadsError(f"there is no prompt file {prompts}")
    if prompts is not None and not prompts.stat().st_size:
        raise HeadsError(f"the prompt file {prompts} is empty")
    if prompts is not None and options.num_own_prompts is not None:
        raise HeadsError("--num-own-prompts cannot be combined with --prompts: leave out one of them")
    if getattr(options, "join", False) and options.adapter_id is None:
        raise HeadsError("--join needs --adapter-id, the adapter to join with the heads")


def _fields(options: argparse.Namespace, *names: str) -> dict[str, Any]:
    return {name: getattr(options, name) for name in names}


def _target(options: argparse.Namespace) -> "TargetOptions":
    import torch

    from lorikeet.adapters.medusa.training import OWN_PROMPTS, TargetOptions

    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    return TargetOptions(
        **_fields(options, "model_id", "adapter_id", "prompts", "url", "max_new_tokens", "batch_size", "seed"),
        num_own_prompts=options.num_own_prompts or OWN_PROMPTS,
        device=device,
        dtype=options.dtype or ("bfloat16" if device.startswith("cuda") else "float32"),
    )


def _train(options: argparse.Namespace) -> int:
    from lorikeet.adapters.medusa import training
    from lorikeet.adapters.medusa.training import HeadsRecipe

    names = ("num_heads", "num_layers", "epochs", "rows_per_step", "lr", "seed")
    recipe = HeadsRecipe(**_fields(options, *names), bf16=options.dtype != "float32")
    work = options.work or options.out.with_name(options.out.name + ".work")
    fields = _fields(options, "out", "held_out", "join", "base_name")
    measured, digest = training.train(
        training.TrainOptions(target=_target(options), work=work, recipe=recipe, **fields)
    )
    print(training.table(measured))
    print(json.dumps({"out": str(options.out), **measured.as_json(), "heads_sha256": digest}), flush=True)
    return 0


def _evaluate(options: argparse.Namespace) -> int:
    from lorikeet.adapters.medusa import training

    measured = training.evaluate(_target(options), options.heads, options.work)
    print(training.table(measured))
    print(json.dumps({"heads": options.heads, **measured.as_json()}), flush=True)
    return 0


def _number(parse: Callable[[str], Any], fits: Callable[[Any], bool], meaning: str) -> Callable[[str], Any]:
    def number(text: str) -> Any:
        if not fits(value := parse(text)):
            raise argparse.ArgumentTypeError(f"{text} is not {meaning}")
        return value

    return number


_positive = _number(int, lambda value: value >= 1, "1 or more")
_share = _number(float, lambda value: 0 < value < 1, "between 0 and 1")
_above_zero = _number(float, lambda value: math.isfinite(value) and value > 0, "a number above 0")


if __name__ == "__main__":
    sys.exit(main())
