"""`lorikeet chat`: a conversation in the terminal with any server that has OpenAI's API.

Answers stream; a line after each says how fast it was and, if the server counts them, what draft tokens gave.
"""

import argparse
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from lorikeet.launcher.cli.client import Client, ServerError, add_server_options, command_parser, token_of

_HELP = """/adapter NAME   answer with this adapter from now on; without a name, with the model
/models         list the model and its adapters
/system TEXT    begin a new conversation with this system message
/new            begin a new conversation
/exit           end, as Ctrl-D does
"""
_EXAMPLES = """examples:
  lorikeet chat
  lorikeet chat --adapter my-adapter --system "Answer in one sentence."
  lorikeet chat --url https://server.example --max-tokens 200 "What is a lorikeet?"

In a conversation, /help lists the commands.
"""


@dataclass
class ChatSession:
    """The messages so far, and how the next one is sent."""

    client: Client
    model: str
    """The name of the model or adapter that answers."""
    fields: Mapping[str, Any]
    """Other fields of the body, such as `temperature`."""
    messages: list[dict[str, str]] = field(default_factory=list)
    """Of `role` and `content`, in OpenAI's form."""

    def restart(self, system: str | None = None) -> None:
        """Forget all messages; begin with a system message if there is one."""
        self.messages = [{"role": "system", "content": system}] if system else []

    def ask(self, text: str) -> Iterator[str]:
        """The pieces of the answer, and at the end its figures. A question that fails leaves the messages as they were.

        Raises ServerError and OSError.
        """
        question = {"role": "user", "content": text}
        body = {"model": self.model, "messages": [*self.messages, question], **self.fields}
        pieces: list[str] = []
        began, first = time.monotonic(), 0.0
        usage: dict[str, Any] = {}
        events = self.client.chat_events(body)
        try:
            for event in events:
                usage = event.get("usage") or usage
                for choice in event.get("choices") or ():
                    delta = choice.get("delta") or {}
                    piece = delta.get("content") or delta.get("reasoning_content") or ""
                    if piece:
                        first = first or time.monotonic()
                        pieces += [delta["content"]] if delta.get("content") else []
                        yield piece
        finally:
            events.close()
            if pieces:
                self.messages += [question, {"role": "assistant", "content": "".join(pieces)}]
        yield f"\n{figures(usage, began, first or time.monotonic(), time.monotonic())}\n"


def figures(usage: Mapping[str, Any], began: float, first: float, end: float) -> str:
    """One line about an answer; times in seconds."""
    num_tokens = usage.get("completion_tokens", 0)
    parts = [f"{num_tokens} tokens", f"first after {first - began:.2f} s"]
    if num_tokens > 1 and end > first:
        parts.append(f"{(num_tokens - 1) / (end - first):.1f} tokens/s")
    details = usage.get("completion_tokens_details") or {}
    if (report := details.get("speculation")) and report["steps"]:
        parts.append(f"{num_tokens / report['steps']:.2f} tokens per step")
    accepted, rejected = details.get("accepted_prediction_tokens"), details.get("rejected_prediction_tokens")
    if accepted is not None and rejected is not None and accepted + rejected:
        parts.append(f"{accepted} of {accepted + rejected} draft tokens accepted")
    return f"[{', '.join(parts)}]"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line, by default that of this process, and return its exit code."""
    options = parser().parse_args(arguments)
    token = token_of(options)
    try:
        client = Client(options.url, token=token)
        is_one = options.message is not None
        base = options.model or (options.adapter if is_one else "") or client.model_names()[0]
    except (ValueError, ServerError) as error:
        return _failed(error)
    except OSError as error:
        return _failed(f"cannot connect to {client.url}: {error}")
    named = {"temperature": options.temperature, "max_tokens": options.max_tokens, "seed": options.seed}
    fields = {name: value for name, value in named.items() if value is not None}
    conversation = ChatSession(client, options.adapter or base, fields)
    conversation.restart(options.system)
    if is_one:
        return _answer(conversation, sys.stdin.read() if options.message == "-" else options.message)
    return _converse(conversation, base)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = command_parser("lorikeet chat", "Talks to a model in the terminal.", _EXAMPLES)
    parser.add_argument("message", nargs="?", help="ask this only, and end; - reads standard input")
    add_server_options(parser)
    parser.add_argument("--model", help="the model's name (default: the first that /v1/models lists)")
    parser.add_argument("--adapter", help="the name of an adapter, in place of the model's")
    parser.add_argument("--system", metavar="TEXT", help="a system message")
    parser.add_argument("--temperature", type=float, help="0 is greedy (default: the server's)")
    parser.add_argument("--max-tokens", type=int, help="maximum tokens of an answer (default: the server's)")
    parser.add_argument("--seed", type=int)
    return parser


def _converse(conversation: ChatSession, base: str) -> int:
    """Answer lines until the input ends. `base` is the model's name."""
    with suppress(ImportError):
        import readline  # noqa: F401  # edits lines and keeps their history

    is_terminal = sys.stdin.isatty()
    if is_terminal:
        print(f"{conversation.client.url}, {conversation.model}. /help lists commands, Ctrl-D ends.")
    while True:
        try:
            line = input("> " if is_terminal else "").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return 0
        verb, _, value = line.partition(" ")
        match verb:
            case "":
                pass
            case "/exit" | "/quit":
                return 0
            case "/help":
                print(_HELP, end="")
            case "/new":
                conversation.restart()
            case "/system":
                conversation.restart(value.strip())
            case "/adapter":
                conversation.model = value.strip() or base
            case "/models":
                _list(conversation)
            case _ if verb.startswith("/"):
                print(f"there is no command {verb}: /help lists them", file=sys.stderr)
            case _:
                _answer(conversation, line)


def _answer(conversation: ChatSession, text: str) -> int:
    """Print one answer. Ctrl-C ends the answer, not the conversation."""
    try:
        for piece in conversation.ask(text):
            print(piece, end="", flush=True)
    except KeyboardInterrupt:
        print("\n[stopped]")
    except ServerError as error:
        return _failed(error)
    except OSError as error:
        return _failed(f"{conversation.client.url}: {error}")
    return 0


def _list(conversation: ChatSession) -> None:
    try:
        print("\n".join(conversation.client.model_names()))
    except (ServerError, OSError) as error:
        _failed(error)


def _failed(error: object) -> int:
    print(f"lorikeet chat: {error}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
