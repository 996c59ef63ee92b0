"""`lorikeet-heads`: the command line. Bad arguments, models that do not fit and so on end in one sentence and code 2.

Knows flags and what they are for; torch is loaded only once the arguments are found good.
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from lorikeet.adapters.errors import HeadsError

if TYPE_CHECKING:
    from lorikeet.adapters.medusa.run import Asked

BAD = 2
STOPPED = 130

PROMPTS_HELP = (
    "prompts the target answers: .jsonl (a string, or an object with `prompt` or `messages`, a line), .json (a list of "
    "such), or any other text file, one prompt a line"
)


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one sentence, without the usage before it."""

    def error(self, message: str) -> NoReturn:
        raise HeadsError(f"{message} (see {self.prog} --help)")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    try:
        options = _parser().parse_args(arguments)
        _check(options)
        code: int = options.run(options)
    except HeadsError as error:
        print(f"lorikeet-heads: {error}", file=sys.stderr)
        return BAD
    except KeyboardInterrupt:
        print("lorikeet-heads: stopped; the same command goes on from here", file=sys.stderr)
        return STOPPED
    return code


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="lorikeet-heads",
        description="Train and measure Medusa heads: small layers that guess several tokens ahead.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=_Parser)
    train = commands.add_parser("train", help="let the target write texts and train heads on them")
    train.set_defaults(run=_train)
    _add_asked(train)
    train.add_argument("--out", type=Path, required=True, help="folder for the heads, in LoRAX's layout")
    train.add_argument(
        "--join", action="store_true", help="put the adapter's files beside the heads: one name for both"
    )
    train.add_argument("--num-heads", type=_positive, default=3, help="tokens guessed ahead (default 3)")
    train.add_argument(
        "--num-layers", type=_positive, default=1, help="blocks per head (default 1; LoRAX reads 1 only)"
    )
    train.add_argument("--work", type=Path, help="texts, hidden rows, checkpoints; a run resumes from here (OUT.work)")
    train.add_argument("--epochs", type=_positive, default=4, help="times that each row is seen (default 4)")
    train.add_argument("--lr", type=_share_or_more, default=1e-3, help="highest learning rate (default 0.001)")
    train.add_argument("--rows-per-step", type=_positive, default=1024, help="rows of one step (default 1024)")
    train.add_argument("--held-out", type=_share, default=0.05, help="share of texts to measure on (default 0.05)")
    train.add_argument("--base-name", help="name of the base in config.json (default: as in --model-id)")
    evaluate = commands.add_parser("eval", help="measure any heads on what the target writes to these prompts")
    evaluate.set_defaults(run=_evaluate)
    _add_asked(evaluate)
    evaluate.add_argument("--heads", required=True, help="folder or hub id of heads, version 1 or 2, joined or not")
    evaluate.add_argument("--work", type=Path, help="keep the texts here, for a run that goes on")
    return parser


def _add_asked(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model-id", required=True, help="base model: folder or hub id")
    parser.add_argument("--adapter-id", help="LoRA adapter of the target: folder or hub id")
    parser.add_argument("--prompts", type=Path, help=PROMPTS_HELP)
    parser.add_argument(
        "--url", help="a running server that writes the texts; without --prompts the target makes them up"
    )
    parser.add_argument("--num-own-prompts", type=_positive, help="prompts made up so (default 1000)")
    parser.add_argument("--max-new-tokens", type=_positive, default=256, help="tokens of one text (default 256)")
    parser.add_argument("--batch-size", type=_positive, default=32, help="texts written at a time (default 32)")
    parser.add_argument("--device", help="cpu, cuda, cuda:1 … (default: cuda where there is one)")
    parser.add_argument(
        "--dtype",
        choices=["float32", "bfloat16", "float16"],
        help="of the model (default: bfloat16 on cuda, float32 on cpu); float32, if given, is that of training too",
    )
    parser.add_argument("--seed", type=int, default=0)


def _check(options: argparse.Namespace) -> None:
    """What can be known before anything is loaded. Raises HeadsError."""
    if options.prompts is None and options.url is None:
        raise HeadsError("give --prompts FILE, or --url SERVER for texts from a running server, or both")
    if options.url is not None and not options.url.startswith(("http://", "https://")):
        raise HeadsError(f"--url {options.url} is not an http address")
    if options.prompts is not None and not options.prompts.is_file():
        raise HeadsError(f"there is no prompt file {options.prompts}")
    if options.prompts is not None and not options.prompts.stat().st_size:
        raise HeadsError(f"the prompt file {options.prompts} is empty")
    if options.prompts is not None and options.num_own_prompts is not None:
        raise HeadsError("--num-own-prompts is for a target that makes up its own: leave out --prompts or it")
    if getattr(options, "join", False) and options.adapter_id is None:
        raise HeadsError("there is nothing to join the heads with: --join needs --adapter-id")


def _asked(options: argparse.Namespace) -> "Asked":
    import torch

    from lorikeet.adapters.medusa.run import OWN_PROMPTS, Asked

    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    return Asked(
        model_id=options.model_id,
        adapter_id=options.adapter_id,
        prompts=options.prompts,
        url=options.url,
        num_own_prompts=options.num_own_prompts or OWN_PROMPTS,
        max_new_tokens=options.max_new_tokens,
        batch_size=options.batch_size,
        device=device,
        dtype=options.dtype or ("bfloat16" if device.startswith("cuda") else "float32"),
        seed=options.seed,
    )


def _train(options: argparse.Namespace) -> int:
    from lorikeet.adapters.medusa import report, run
    from lorikeet.adapters.medusa.training import Recipe

    recipe = Recipe(
        num_heads=options.num_heads,
        num_layers=options.num_layers,
        epochs=options.epochs,
        rows_per_step=options.rows_per_step,
        lr=options.lr,
        seed=options.seed,
        bf16=options.dtype != "float32",
    )
    found, digest = run.train(
        run.TrainOptions(
            asked=_asked(options),
            out=options.out,
            work=options.work or options.out.with_name(options.out.name + ".work"),
            recipe=recipe,
            held_out=options.held_out,
            join=options.join,
            base_name=options.base_name,
        )
    )
    print(report.table(found))
    print(json.dumps({"out": str(options.out), **found.as_json(), "heads_sha256": digest}), flush=True)
    return 0


def _evaluate(options: argparse.Namespace) -> int:
    from lorikeet.adapters.medusa import report, run

    found = run.evaluate(run.EvalOptions(_asked(options), options.heads, options.work))
    print(report.table(found))
    print(json.dumps({"heads": options.heads, **found.as_json()}), flush=True)
    return 0


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number from 1 on")
    return number


def _share(text: str) -> float:
    number = float(text)
    if not 0 < number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1")
    return number


def _share_or_more(text: str) -> float:
    number = float(text)
    if not (math.isfinite(number) and number > 0):
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
    return number
