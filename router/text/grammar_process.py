"""Checks grammars in processes that can be killed, because llguidance's own limits do not bound all of its work.

`python -m lorikeet.router.text.grammar_process FD FOLDER` reads the model's tokenizer once and has one thread, so that
it can fork (`lorikeet.proto.process`). A forked process answers each line of JSON with another. The check is what the
shard does: it compiles the grammar and computes the first mask.
"""

import gc
import json
import math
import re
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llguidance
from llguidance import LLMatcher, LLTokenizer

from lorikeet.proto.children import answer as send
from lorikeet.proto.children import serve_forks
from lorikeet.proto.grammars import GRAMMAR_LIMITS, read_grammar_tokenizer
from lorikeet.proto.process import end_with_parent
from lorikeet.router.text.json_schemas import enforced

OVERRIDES: Any = {"lenient": False, "coerce_one_of": False, "whitespace_pattern": r"[\x20\x0A]{1,2}"}
"""Options that a schema's own `x-guidance` cannot weaken."""
PROCESSOR_S = 1
"""Processor time of one check, rounded up to a whole second."""
MEMORY = 512 << 20
"""Bytes that a check may allocate."""
STACK = 4 << 20
"""Bytes of a check's stack, a part of a shard thread's: a deep grammar that passes here does not end a shard."""
MAX_ANSWER_BYTES = 4 << 20


def check(tokenizer: LLTokenizer, kind: str, value: Any) -> dict[str, str]:
    """`grammar`, as shards take it, or `error`, the reason why it is refused."""
    try:
        grammar = MAKERS[kind](_with_named_texts(value, tokenizer) if kind == "grammar" else value)
        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=GRAMMAR_LIMITS)
        if not matcher.get_error():
            matcher.compute_bitmask()
        problem = matcher.get_error()
    except BaseException as failure:  # bad input is a ValueError; the library's panics are no subclass of Exception
        problem = str(failure) or type(failure).__name__
    if problem:
        return {"error": _in_words_of_callers(problem.strip().splitlines()[0])[:500]}
    return {"grammar": grammar}


_UNIMPLEMENTED = re.compile(r"Unimplemented keys: \[(.*)\]")


def _in_words_of_callers(problem: str) -> str:
    """The library's message about a schema, without options that callers cannot set."""
    if problem.startswith("oneOf constraints are not supported"):
        return "alternatives of `oneOf` that may overlap cannot be enforced: use `anyOf`"
    if (match := _UNIMPLEMENTED.fullmatch(problem)) is not None:
        return f"these keywords cannot be enforced: {match[1].replace(chr(34), '`')}"
    return problem


_TERMS = re.compile(r'"(?:\\.|[^"\\\n])*"|/(?!/)(?:\\.|[^/\\\n])+/|(?://|\#)[^\n]*|(<[^<>\[\]\s]+>)')
"""Literal texts, regular expressions and comments of a grammar; the names of tokens are the group."""


def _with_named_texts(grammar: str, tokenizer: LLTokenizer) -> str:
    """With the text of each added token that the grammar names as `<name>`: llguidance knows only special tokens."""

    def written(term: re.Match[str]) -> str:
        ids = tokenizer.tokenize_str(term[1]) if term[1] else []
        is_text = len(ids) == 1 and not tokenizer.is_special_token(ids[0])
        return json.dumps(term[1]) if is_text else term[0]

    return _TERMS.sub(written, grammar)


def _choice(texts: list[str]) -> str:
    """One token of the grammar, not one rule per text: the parser's rows are bounded, and 4 096 rules exceed them."""
    return str(llguidance.grammar_from("grammar", "start: CHOICE\nCHOICE: " + " | ".join(map(literal, texts))))


def literal(text: str) -> str:
    """A text in Lark."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _schema(value: Any) -> str:
    return str(LLMatcher.grammar_from_json_schema(json.dumps(enforced(value)[0]), overrides=OVERRIDES))


MAKERS: dict[str, Callable[[Any], str]] = {
    "json_schema": _schema,
    "regex": lambda value: str(LLMatcher.grammar_from_regex(value)),
    "choice": _choice,
    "grammar": lambda value: str(llguidance.grammar_from("grammar", value)),
}


def _work(connection: socket.socket, tokenizer: LLTokenizer) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_STACK, (STACK, resource.getrlimit(resource.RLIMIT_STACK)[1]))
    if sys.platform == "linux":
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    with connection, connection.makefile("rwb") as stream:
        for line in stream:
            kind, value = json.loads(line)
            used = math.ceil(time.process_time())
            resource.setrlimit(resource.RLIMIT_CPU, (used + PROCESSOR_S, resource.getrlimit(resource.RLIMIT_CPU)[1]))
            answer = json.dumps(check(tokenizer, kind, value)).encode()
            if len(answer) > MAX_ANSWER_BYTES:
                answer = json.dumps({"error": f"it has more than {MAX_ANSWER_BYTES} bytes"}).encode()
            stream.write(answer + b"\n")
            stream.flush()


def main() -> None:
    """Fork until the other end closes."""
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # from a terminal: the router ends this process when it has drained
    control = socket.socket(fileno=int(sys.argv[1]))
    try:
        tokenizer = read_grammar_tokenizer(Path(sys.argv[2]))
    except BaseException as failure:
        send(control, {"failed": f"the model's tokenizer cannot be used: {failure}"[:1000]})
        raise
    send(control, {"ready": True})
    gc.freeze()  # so that collections in forked processes copy no page
    serve_forks(control, lambda connection, _: _work(connection, tokenizer))


if __name__ == "__main__":
    main()
