"""`lorikeet-replay`: repeats the request of a receipt and compares the tokens."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import Any

from lorikeet.launcher.cli.client import URL_HELP, Client, ServerError
from lorikeet.launcher.cli.receipt import Prompt, Receipt, ReceiptError, different_parts, first_difference, found_in


@dataclass(frozen=True)
class Outcome:
    """The result of one replay."""

    is_identical: bool
    num_tokens: int = 0
    """Tokens of the new output."""
    position: int | None = None
    """Position of the first token that differs; None if none does, or if the receipt holds only hashes."""
    parts: list[str] = field(default_factory=list)
    """Other inputs of generation that differ."""
    error: str = ""
    """Why there was no response to compare."""


_EXAMPLES = """examples:
  lorikeet-replay answer.json
  lorikeet-replay receipts.jsonl --url http://another:3000 --prompt prompts.jsonl
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line, by default that of this process: 0 if every output was identical, else 1."""
    given = parser().parse_args(arguments)
    try:
        _check_token(given.token or os.environ.get("LORIKEET_TOKEN") or "")
        client = Client(given.url, token=given.token or os.environ.get("LORIKEET_TOKEN"))
        receipts = list(found_in(_text_of(given.receipt)))
        if not receipts:
            raise ReceiptError(f"{given.receipt} contains no receipt")
        prompts = _prompts(given.prompt, receipts)
    except (ReceiptError, OSError, ValueError) as error:
        print(_printable(f"lorikeet-replay: {error}"), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return _replay_all(client, receipts, prompts)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = argparse.ArgumentParser(
        prog="lorikeet-replay",
        description="Repeats the request of a receipt: exit code 0 if the tokens are the same, else 1.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    result.add_argument(
        "receipt", help="file with a receipt, a response that includes one, or one per line; - reads standard input"
    )
    result.add_argument("--url", help=URL_HELP)
    result.add_argument("--token", help="bearer token (default: the variable LORIKEET_TOKEN)")
    result.add_argument(
        "--prompt",
        metavar="FILE",
        help="the prompt of a receipt without one: text, or as JSON token ids or chat messages;"
        " for several receipts one JSON line each, in the same order",
    )
    return result


def replay(client: Client, receipt: Receipt, prompt: Prompt | None = None) -> Outcome:
    """Repeat the request and compare."""
    try:
        path, body = receipt.request(prompt)
        headers = {"x-request-id": receipt.request_id} if receipt.request_id else {}
        answer = client.post(path, body, headers)
    except ServerError as error:
        return Outcome(False, error=f"the server rejected the request: {error}")
    except (HTTPException, ValueError):
        return Outcome(False, error=f"{client.url} does not answer as a Lorikeet server does")
    except OSError as error:
        return Outcome(False, error=f"cannot connect to {client.url}: {error}")
    except ReceiptError as error:
        return Outcome(False, error=str(error))
    try:
        again = next(found_in(json.dumps(answer)))
    except (ReceiptError, StopIteration) as error:
        return Outcome(False, error=f"the response includes no receipt to compare: {error}")
    return compared(receipt, again)


def compared(receipt: Receipt, again: Receipt) -> Outcome:
    """A receipt and that of its replay."""
    parts = different_parts(receipt, again)
    if receipt.values["output"]["sha256"] == again.values["output"]["sha256"]:
        return Outcome(True, again.num_tokens, parts=parts)
    before, after = receipt.output_ids, again.output_ids
    position = None if before is None or after is None else first_difference(before, after)
    return Outcome(False, again.num_tokens, position, parts)


def sentences(receipt: Receipt, outcome: Outcome) -> list[str]:
    """The printed lines of one replay."""
    if outcome.error:
        return [outcome.error]
    if outcome.is_identical:
        return [f"identical: {outcome.num_tokens} tokens", *(f"  different {part}" for part in outcome.parts)]
    place = "" if outcome.position is None else f" from token {outcome.position} on"
    lines = [f"different{place}: {receipt.num_tokens} tokens before, {outcome.num_tokens} now"]
    lines += [f"  different {part}" for part in outcome.parts]
    if all(part.startswith("version:") for part in outcome.parts):
        lines.append("  only the tokens differ, all inputs are the same")
    return lines


def _replay_all(client: Client, receipts: list[Receipt], prompts: list[Prompt | None]) -> int:
    num_identical = 0
    for receipt, prompt in zip(receipts, prompts, strict=True):
        try:
            outcome = replay(client, receipt, prompt)
        except KeyboardInterrupt:
            return 130
        num_identical += outcome.is_identical
        name = f"{receipt.request_id}: " if len(receipts) > 1 else ""
        lines = [name + sentences(receipt, outcome)[0], *sentences(receipt, outcome)[1:]]
        print("\n".join(map(_printable, lines)), flush=True)
    if len(receipts) != 1:
        print(f"{num_identical} of {len(receipts)} identical")
    return 0 if num_identical == len(receipts) else 1


def _check_token(token: str) -> None:
    if not (token.isascii() and token.isprintable()):
        raise ReceiptError("the token has characters that no header may have, perhaps a line end")


def _printable(text: str) -> str:
    """The text with escapes for what a terminal would obey."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def _text_of(name: str) -> str:
    return sys.stdin.read() if name == "-" else Path(name).read_text()


def _prompts(path: str | None, receipts: list[Receipt]) -> list[Prompt | None]:
    """For each of the receipts. Raises ReceiptError or OSError."""
    if path is None:
        return [None] * len(receipts)
    text = Path(path).read_text()
    if len(receipts) == 1:
        return [_prompt(text)]
    try:
        values = [json.loads(line) for line in text.splitlines() if line.strip()]
    except ValueError as error:
        raise ReceiptError(f"{path} must contain one JSON line for each receipt: {error}") from None
    if len(values) != len(receipts):
        raise ReceiptError(f"{path} contains {len(values)} prompts for {len(receipts)} receipts")
    return [value if isinstance(value, str) or _is_structured(value) else str(value) for value in values]


def _prompt(text: str) -> Prompt:
    """JSON of token ids or messages is parsed; everything else is the text of the prompt."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if _is_structured(value) else text


def _is_structured(value: Any) -> bool:
    if not isinstance(value, list) or not value:
        return False
    return all(type(item) is int for item in value) or all(isinstance(item, dict) and "role" in item for item in value)


if __name__ == "__main__":
    sys.exit(main())
