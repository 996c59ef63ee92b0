"""`lorikeet-replay`: asks a server for the text of a receipt again and says whether its tokens are the same.

Knows the command line and what is printed; what a receipt asks for is receipt.py's, the wire client.py's.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lorikeet.launcher.cli.client import Client, ServerError
from lorikeet.launcher.cli.receipt import Prompt, Receipt, ReceiptError, different_parts, first_difference, found_in


@dataclass(frozen=True)
class Outcome:
    """What came of one replay."""

    is_identical: bool
    num_tokens: int = 0
    """Of the text as it came now."""
    position: int | None = None
    """Of the first token that differs; None where none does, or where the receipt holds hashes alone."""
    parts: list[str] = field(default_factory=list)
    """What else differs of all that tokens follow from."""
    error: str = ""
    """Why there was no answer to compare."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line (this process's own without `arguments`): 0 where every text came again, else 1."""
    given = parser().parse_args(arguments)
    client = Client(given.url, token=given.token or os.environ.get("LORIKEET_TOKEN"))
    try:
        receipts = list(found_in(_text_of(given.receipt)))
        if not receipts:
            raise ReceiptError(f"{given.receipt} holds no receipt")
        prompts = _prompts(given.prompt, receipts)
    except (ReceiptError, OSError, UnicodeDecodeError) as error:
        print(f"lorikeet-replay: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return _replay_all(client, receipts, prompts)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = argparse.ArgumentParser(
        prog="lorikeet-replay",
        description="Asks a server for the text of a receipt again: exit code 0 if the tokens are the same, else 1.",
    )
    result.add_argument(
        "receipt", help="file with a receipt, an answer that holds one, or one in each line; - reads standard input"
    )
    result.add_argument("--url", default="http://127.0.0.1:3000", help="the server (default: %(default)s)")
    result.add_argument("--token", help="bearer token (default: the variable LORIKEET_TOKEN)")
    result.add_argument(
        "--prompt",
        metavar="FILE",
        help="the prompt of a receipt without one: a text, or as JSON its token ids or the messages of a chat;"
        " for several receipts a line of JSON each, in their order",
    )
    return result


def replay(client: Client, receipt: Receipt, prompt: Prompt | None = None) -> Outcome:
    """Ask again and compare."""
    try:
        path, body = receipt.request(prompt)
        headers = {"x-request-id": receipt.request_id} if receipt.request_id else {}
        answer = client.post(path, body, headers)
    except ServerError as error:
        return Outcome(False, error=f"the server refuses: {error}")
    except OSError as error:
        return Outcome(False, error=f"nobody answers at {client.url}: {error}")
    except ReceiptError as error:
        return Outcome(False, error=str(error))
    try:
        (again,) = found_in(json.dumps(answer))
    except ReceiptError as error:
        return Outcome(False, error=f"the answer tells nothing to compare: {error}")
    return compared(receipt, again)


def compared(receipt: Receipt, again: Receipt) -> Outcome:
    """A receipt and that of its replay."""
    parts = different_parts(receipt, again)
    if receipt.told["output"]["sha256"] == again.told["output"]["sha256"]:
        return Outcome(True, again.num_tokens, parts=parts)
    before, after = receipt.output_ids, again.output_ids
    position = None if before is None or after is None else first_difference(before, after)
    return Outcome(False, again.num_tokens, position, parts)


def sentences(receipt: Receipt, outcome: Outcome) -> list[str]:
    """What is printed of one replay."""
    if outcome.error:
        return [outcome.error]
    if outcome.is_identical:
        return [f"identical: {outcome.num_tokens} tokens", *(f"  though not the same {part}" for part in outcome.parts)]
    place = "" if outcome.position is None else f" from token {outcome.position} on"
    lines = [f"different{place}: {receipt.num_tokens} tokens then, {outcome.num_tokens} now"]
    lines += [f"  not the same {part}" for part in outcome.parts]
    if all(part.startswith("version:") for part in outcome.parts):
        lines.append("  only the tokens differ: all that they follow from is the same")
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
        print(name + "\n".join(sentences(receipt, outcome)), flush=True)
    if len(receipts) != 1:
        print(f"{num_identical} of {len(receipts)} identical")
    return 0 if num_identical == len(receipts) else 1


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
        raise ReceiptError(f"{path} must hold a line of JSON for each receipt: {error}") from None
    if len(values) != len(receipts):
        raise ReceiptError(f"{path} holds {len(values)} prompts for {len(receipts)} receipts")
    return [value if isinstance(value, str) or _is_structured(value) else str(value) for value in values]


def _prompt(text: str) -> Prompt:
    """A file that holds a list of token ids or messages is that, every other one a text as it stands."""
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
