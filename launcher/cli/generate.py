"""`lorikeet-generate`: streams one completion of a running server; `-v` colours tokens by what proposed them."""

import argparse
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lorikeet.launcher.cli.client import AnswerToken, Client, ServerError, add_server_options, command_parser, token_of
from lorikeet.proto.draft_sources import BY_VALUE, methods

_REQUEST = (
    *("max_new_tokens", "temperature", "top_k", "top_p", "repetition_penalty", "seed", "stop", "ignore_eos_token"),
    *("adapter_id", "adapter_source", "heads_id"),
    *("speculative_tokens", "speculative_method", "speculative_schedule", "speculative_verification"),
)
"""Options that are fields of a request with the same names."""

_EXAMPLES = """examples:
  lorikeet-generate -v "def read_lines(path):"
  lorikeet-generate --adapter-id json --max-new-tokens 64 --speculative-tokens 3 "Record:"
  echo "import os" | lorikeet-generate --url :8080 -
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line, by default that of this process, and return its exit code."""
    options = parser().parse_args(arguments)
    try:
        client = Client(options.url, token=token_of(options))
    except ValueError as error:
        print(f"lorikeet-generate: {error}", file=sys.stderr)
        return 2
    prompt = sys.stdin.read() if options.prompt == "-" else options.prompt
    try:
        write(
            client, prompt, request_parameters(options), verbose=options.verbose, colours=_wants_colours(options.color)
        )
    except ServerError as error:
        print(f"\nlorikeet-generate: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"lorikeet-generate: cannot connect to {client.url}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print()
        return 130
    return 0


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = command_parser("lorikeet-generate", "Streams one completion of a running server.", _EXAMPLES)
    result.add_argument("prompt", help="the prompt; - reads standard input")
    add_server_options(result)
    result.add_argument("-v", "--verbose", action="store_true", help="colour tokens by their source, print statistics")
    result.add_argument("--color", choices=("auto", "always", "never"), default="auto", help="when to use colours")
    request = result.add_argument_group("fields of the request, as in /generate")
    request.add_argument("-M", "--max-new-tokens", type=int, help="maximum number of tokens (default: the server's)")
    request.add_argument("--temperature", type=float, help="0 is greedy (default)")
    request.add_argument("--top-k", type=int)
    request.add_argument("--top-p", type=float)
    request.add_argument("--repetition-penalty", type=float)
    request.add_argument("-s", "--seed", type=int)
    request.add_argument("--stop", action="append", metavar="TEXT", help="may be repeated")
    request.add_argument("--ignore-eos-token", action="store_const", const=True)
    request.add_argument("--adapter-id", help="an alias or the name of an adapter")
    request.add_argument("--adapter-source", help="hub, local or s3")
    request.add_argument("--heads-id", help="Medusa heads in addition to the adapter")
    request.add_argument("-g", "--speculative-tokens", "--gamma", type=int, help="draft tokens per step")
    request.add_argument("--speculative-method", help=f"one of {', '.join(methods())}")
    request.add_argument("--speculative-schedule", help="constant, heuristic or auto")
    request.add_argument(
        "--speculative-verification", "--speculative-verify", help="shared-noise or rejection (google, deepmind)"
    )
    return result


def request_parameters(options: argparse.Namespace) -> dict[str, Any]:
    """The fields that were given. Sampling parameters imply `do_sample`."""
    parameters = {name: getattr(options, name) for name in _REQUEST if getattr(options, name) is not None}
    if parameters.keys() & {"temperature", "top_k", "top_p"}:
        parameters["do_sample"] = True
    return parameters


def write(client: Client, prompt: str, parameters: dict[str, Any], *, verbose: bool, colours: bool) -> str:
    """Stream the text to standard output and return it; `verbose` adds statistics on standard error."""
    paint = painter(colours and verbose)
    began = time.monotonic()
    with client.stream(prompt, **parameters) as stream:
        for token in stream:
            if not token.special:
                print(paint(token), end="", flush=True)
    print(flush=True)
    if verbose:
        print(summary(stream.details, time.monotonic() - began), file=sys.stderr)
        if colours and (report := stream.details.get("speculation")):
            print(legend(report), file=sys.stderr)
    return stream.text or ""


def _wants_colours(choice: str) -> bool:
    if choice == "auto":
        return sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    return choice == "always"


if __name__ == "__main__":
    sys.exit(main())


_RESET = "\x1b[0m"
COLOURS = {
    "prefill": "\x1b[32m",
    "target": "\x1b[35m",
    **{row.name: f"\x1b[{row.colours.terminal}m" for row in BY_VALUE.values()},
    "resample": "\x1b[34m",
    "bonus": "\x1b[95m",
}
"""Colours by source: the prompt's last step, a step without draft tokens, accepted draft tokens by method, …

They are those of LLMSpeculativeSampling: accepted draft tokens red, tokens that replace a rejected one blue, other
tokens of the target magenta."""
_STAGES = ("draft", "verify", "accept")


def painter(colours: bool) -> Callable[[AnswerToken], str]:
    """A function from a token to its text, in its source's colour with `colours`."""

    def paint(token: AnswerToken) -> str:
        colour = COLOURS.get(token.source or "")
        return f"{colour}{token.text}{_RESET}" if colours and colour else token.text

    return paint


def legend(report: Mapping[str, Any]) -> str:
    """One line that names the colours of the answer."""
    return " ".join(f"{colour}{name}{_RESET}" for name, colour in COLOURS.items() if report["sources"].get(name))


def summary(details: Mapping[str, Any], seconds: float) -> str:
    """One line about an answer that took `seconds`: tokens, steps, accepted and drafted tokens, times."""
    num_tokens = details["generated_tokens"]
    parts = [f"{num_tokens} tokens in {seconds:.2f} s"]
    report = details.get("speculation")
    if report is None:
        return f"{parts[0]}, without speculation"
    steps = report["steps"]
    parts.append(f"{steps} steps ({num_tokens / max(steps, 1):.2f} tokens each)")
    share = f" ({report['accepted'] / report['drafted']:.0%})" if report["drafted"] else ""
    parts.append(f"accepted {report['accepted']}/{report['drafted']}{share}")
    parts.append(counts(report))
    spent = [f"{name} {report[key]:.3f} s" for name in _STAGES if (key := f"{name}_seconds") in report]
    return "; ".join([*parts, *([", ".join(spent)] if spent else [])])


def counts(report: Mapping[str, Any]) -> str:
    """Number of tokens per source."""
    return ", ".join(f"{name} {report['sources'][name]}" for name in COLOURS if report["sources"].get(name))
