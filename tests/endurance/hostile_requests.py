"""Kinds of requests that a server must survive, good ones among them: the bytes of each and its right answer."""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

MAX_NEW_TOKENS = 40
GOOD_SHARE = 0.4
"""Share of good requests among those that are not cancelled."""
THREE_MB = 3_000_000
TOO_LARGE = 17 * 1024 * 1024
"""Above the default of --max-body-bytes."""


@dataclass(frozen=True)
class Attempt:
    """One request as bytes, and what must come back."""

    kind: str
    payload: bytes
    right: Callable[[int, bytes], bool]
    """Whether (status, body) is the right answer; unused if the client goes away."""
    leaves_after_s: float | None = None
    """When the client closes the connection."""


def attempt(draw: random.Random, leaves: bool) -> Attempt:
    """A random request; with `leaves` a good one whose client goes away at a random moment."""
    if leaves:
        good = draw.choice(GOOD)(draw)
        return Attempt(f"cancelled {good.kind}", good.payload, good.right, draw.uniform(0.0, 1.0))
    return draw.choice(GOOD if draw.random() < GOOD_SHARE else BAD)(draw)


def post(path: str, body: bytes, media_type: str = "application/json") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: {media_type}\r\nConnection: close\r\n"
    return head.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body


def _prompt(draw: random.Random) -> str:
    return "def " + "".join(draw.choices("abcdefgh_ (:\0é🦜", k=draw.randint(3, 120)))


def _native(draw: random.Random, count: int, **parameters: Any) -> bytes:
    chosen = {"max_new_tokens": count, "ignore_eos_token": True, "details": True, **parameters}
    return json.dumps({"inputs": _prompt(draw), "parameters": chosen}).encode()


def _answered(draw: random.Random) -> Attempt:
    count = draw.randint(1, MAX_NEW_TOKENS)

    def right(status: int, body: bytes) -> bool:
        details = json.loads(body)["details"]
        result = (details["generated_tokens"], len(details["tokens"]), details["finish_reason"])
        return status == 200 and result == (count, count, "length")

    return Attempt("answered", post("/generate", _native(draw, count)), right)


def _sampled(draw: random.Random) -> Attempt:
    count = draw.randint(1, MAX_NEW_TOKENS)
    seed = draw.randrange(1 << 40)
    body = _native(draw, count, do_sample=True, temperature=0.9, top_k=20, seed=seed)

    def right(status: int, answer: bytes) -> bool:
        details = json.loads(answer)["details"]
        return status == 200 and (details["generated_tokens"], details["seed"]) == (count, seed)

    return Attempt("sampled", post("/generate", body), right)


def _streamed(draw: random.Random) -> Attempt:
    count = draw.randint(1, MAX_NEW_TOKENS)

    def right(status: int, body: bytes) -> bool:
        events = [json.loads(line[5:]) for line in body.split(b"\n") if line.startswith(b"data:")]
        return status == 200 and len(events) == count and events[-1]["details"]["generated_tokens"] == count

    return Attempt("streamed", post("/generate_stream", _native(draw, count)), right)


def _chat(draw: random.Random) -> Attempt:
    count = draw.randint(1, MAX_NEW_TOKENS)
    message = {"role": "user", "content": _prompt(draw)}
    body = {"model": "", "messages": [message], "max_tokens": count, "ignore_eos_token": True, "stream": True}

    def right(status: int, answer: bytes) -> bool:
        return status == 200 and answer.rstrip().endswith(b"data: [DONE]") and b'"finish_reason":"length"' in answer

    return Attempt("chat", post("/v1/chat/completions", json.dumps(body).encode()), right)


def _best_of(draw: random.Random) -> Attempt:
    count = draw.randint(1, MAX_NEW_TOKENS)
    body = _native(draw, count, do_sample=True, top_k=5, best_of=2, decoder_input_details=True)

    def right(status: int, answer: bytes) -> bool:
        details = json.loads(answer)["details"]
        result = [details, *details["best_of_sequences"]]
        whole = [(one["generated_tokens"], len(one["tokens"]), bool(one["prefill"])) for one in result]
        return status == 200 and whole == [(count, count, True)] * 2

    return Attempt("best of two", post("/generate", body), right)


def _choices(draw: random.Random) -> Attempt:
    count = draw.randint(1, MAX_NEW_TOKENS)
    body = {"model": "", "prompt": [_prompt(draw), "x"], "n": 2, "max_tokens": count, "ignore_eos_token": True}

    def right(status: int, answer: bytes) -> bool:
        result = json.loads(answer)
        return status == 200 and (len(result["choices"]), result["usage"]["completion_tokens"]) == (4, 4 * count)

    return Attempt("choices", post("/v1/completions", json.dumps(body).encode()), right)


GOOD = (_answered, _sampled, _streamed, _chat, _best_of, _choices)


def _accepted(kind: str, body: bytes) -> Callable[[random.Random], Attempt]:
    """An unusual body that is a valid request."""
    return lambda draw: Attempt(kind, post("/generate", body), lambda status, answer: status == 200)


def _rejected(
    kind: str, body: bytes, status: int, words: str, path: str = "/generate", media_type: str = "application/json"
) -> Callable[[random.Random], Attempt]:
    """A body that must be rejected with this status and these words."""

    def right(got: int, answer: bytes) -> bool:
        return got == status and words.encode() in answer

    return lambda draw: Attempt(kind, post(path, body, media_type), right)


def _cut(draw: random.Random) -> Attempt:
    """The client closes in the middle of its body."""
    whole = post(draw.choice(("/generate", "/generate_stream", "/v1/completions")), _native(draw, 4))
    return Attempt("cut", whole[: draw.randint(1, len(whole) - 1)], lambda *_: True, draw.uniform(0.0, 0.3))


NOT_JSON = "Failed to parse the request body as JSON"
WRONG_TYPE = "Failed to deserialize the JSON body into the target type"
INVALID = "Input validation error"
BAD: tuple[Callable[[random.Random], Attempt], ...] = (
    _cut,
    _accepted("escaped NUL", b'{"inputs": "a\\u0000b", "parameters": {"max_new_tokens": 2}}'),
    _accepted(
        "3 MB in another field", b'{"inputs": "a", "parameters": {"max_new_tokens": 2}, "x": "%s"}' % (b"x" * THREE_MB)
    ),
    _rejected("bad JSON", b'{"inputs": "a",', 400, NOT_JSON),
    _rejected("no body", b"", 400, NOT_JSON),
    _rejected("not an object", b'["inputs"]', 422, WRONG_TYPE),
    _rejected("deep nesting", b"[" * 100_000, 400, NOT_JSON),
    _rejected("deep nesting inside", b'{"inputs": ' + b"[" * 50_000, 400, NOT_JSON),
    _rejected("infinite", b'{"inputs": "a", "parameters": {"temperature": 1e999}}', 400, NOT_JSON),
    _rejected("broken rule", b'{"inputs": "a", "parameters": {"top_k": 0}}', 422, INVALID),
    _rejected("wrong type", b'{"inputs": 5}', 422, WRONG_TYPE),
    _rejected("wrong type inside", b'{"inputs": "a", "parameters": {"max_new_tokens": "many"}}', 422, WRONG_TYPE),
    _rejected("negative", b'{"inputs": "a", "parameters": {"max_new_tokens": -1}}', 422, WRONG_TYPE),
    _rejected("huge integer", b'{"inputs": "a", "parameters": {"seed": %d}}' % 10**40, 422, WRONG_TYPE),
    _rejected("huge count", b'{"inputs": "a", "parameters": {"max_new_tokens": 4000000000}}', 422, INVALID),
    _rejected("huge penalty", b'{"inputs": "a", "parameters": {"frequency_penalty": 1e30}}', 422, INVALID),
    _rejected("beyond a float", b'{"inputs": "a", "parameters": {"frequency_penalty": 1e300}}', 422, WRONG_TYPE),
    _rejected("not a number", b'{"inputs": "a", "parameters": {"temperature": NaN}}', 400, NOT_JSON),
    _rejected("empty", b'{"inputs": ""}', 422, "`inputs` cannot be empty"),
    _rejected("raw NUL", b'{"inputs": "a\x00b"}', 400, NOT_JSON),
    _rejected("invalid UTF-8", b'{"inputs": "\xff\xfe\x80"}', 400, NOT_JSON),
    _rejected("3 MB", json.dumps({"inputs": "x y " * (THREE_MB // 4)}).encode(), 422, INVALID),
    _rejected("too large", b" " * TOO_LARGE, 413, "Failed to buffer the request body"),
    _rejected("wrong media type", b'{"inputs": "a"}', 415, "Expected request with", media_type="text/plain"),
    _rejected("unknown model", b'{"model": "nobody", "prompt": "a"}', 404, "model_not_found", "/v1/completions"),
    _rejected("bad JSON for OpenAI", b'{"model": ', 400, '"invalid_request_error"', "/v1/chat/completions"),
)
