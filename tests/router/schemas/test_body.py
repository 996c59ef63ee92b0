"""The cost of a body's values before it is parsed."""

import sys
from typing import Any

import orjson
import pytest

from lorikeet.router.errors import BodyTooDetailed
from lorikeet.router.schemas.body import _exact_values_size, _values_size

N = 20_000
BODIES = {
    "numbers": b"[" + b",".join([b"1.5"] * N) + b"]",
    "large integers": b"[" + b",".join([b"1000000007"] * N) + b"]",
    "lists": b"[" + b",".join([b"[1000]"] * N) + b"]",
    "empty lists": b"[" + b",".join([b"[]"] * N) + b"]",
    "objects": b"[" + b",".join([b'{"a":"b"}'] * N) + b"]",
    "empty objects": b"[" + b",".join([b"{}"] * N) + b"]",
    "texts": b"[" + b",".join([b'"abcdefgh"'] * N) + b"]",
    "names": b"{" + b",".join(b'"%d":0' % index for index in range(N)) + b"}",
}


def memory_of(value: Any) -> int:
    size = sys.getsizeof(value)
    if isinstance(value, dict):
        return size + sum(sys.getsizeof(name) + memory_of(each) for name, each in value.items())
    return size + sum(map(memory_of, value)) if isinstance(value, list) else size


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_the_cost_covers_the_parsed_values(body: bytes) -> None:
    assert _values_size(body, 1 << 30) + len(body) >= 0.75 * memory_of(orjson.loads(body))


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_a_body_of_many_values_is_rejected(body: bytes) -> None:
    with pytest.raises(BodyTooDetailed):
        _values_size(body, 500_000)


def test_characters_inside_texts_cost_nothing() -> None:
    for text in ('a,[{"' * 100_000, "\\" * 200_000, '\\"' * 100_000, ("x" * 65535 + "\\") * 3, '"\\\\"' * 70_000):
        body = orjson.dumps({"inputs": text, "ids": [1, 2, 3]})
        exact = _exact_values_size(body, 1 << 30)
        assert exact == 256 + 64 + 3 * 40 + 6 * 28, text[:5]
        assert _values_size(body, 1000) <= 1000
