"""Which kernel the table chooses, and its file."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

from lorikeet.shard.attention import kernel_limits
from lorikeet.shard.attention.kernel_limits import BUILT_IN, KernelLimits, Limit
from lorikeet.shard.batch.padding import Padding
from lorikeet.shard.config import ShardConfig

TABLE = KernelLimits((Limit(1024, 1024), Limit(8192, 2048), Limit(None, 600)))
SEGMENTS = some.lists(some.tuples(some.integers(1, 9000), some.integers(0, 40_000)), min_size=1, max_size=20)
"""Query length, and tokens before the query."""


def chosen(table: KernelLimits, *segments: tuple[int, int]) -> list[bool]:
    """Query and context length of each segment. Returns whether the paged kernel computes it."""
    queries, contexts = (np.array(each, np.int32) for each in zip(*segments, strict=True))
    found: list[bool] = table.is_paged(queries, contexts).tolist()
    return found


def test_the_limit_is_that_of_the_first_context_that_is_as_long() -> None:
    inside = ((1024, 1024), (1025, 1025), (2048, 8192), (600, 8193), (600, 10**6))
    outside = ((2049, 8192), (601, 8193), (601, 10**6))
    assert chosen(TABLE, *inside) == [True] * len(inside)
    assert chosen(TABLE, *outside) == [False] * len(outside)


def test_by_default_the_paged_kernel_computes_512_tokens() -> None:
    assert chosen(BUILT_IN, (512, 512), (512, 10**5), (513, 513)) == [True, True, False]


@given(SEGMENTS)
def test_other_segments_of_a_step_change_nothing(segments: list[tuple[int, int]]) -> None:
    pairs = [(query, query + before) for query, before in segments]
    assert chosen(TABLE, *pairs) == [chosen(TABLE, pair)[0] for pair in pairs]


@given(SEGMENTS)
def test_decoding_verification_and_captured_steps_are_the_paged_kernel_s(segments: list[tuple[int, int]]) -> None:
    longest = Padding(ShardConfig("", "", "").graph_rows, 2**20, 0).most_rows
    assert longest <= kernel_limits.LEAST_QUERY <= TABLE.most_captured == 600
    short = [(1 + query % longest, 1 + query % longest + before) for query, before in segments]
    assert all(chosen(TABLE, *short))


def test_the_file_of_the_package_is_valid_and_as_it_would_be_written() -> None:
    text = kernel_limits.FILE.read_text()
    assert kernel_limits.written(kernel_limits.parse(text, "the file")) == text
    assert kernel_limits.read_limits((7, 0), "FA2") == BUILT_IN


def test_limits_of_a_card_replace_its_own_alone(tmp_path: Path) -> None:
    path = tmp_path / "limits.json"
    path.write_text(kernel_limits.written({"default": BUILT_IN, "8.0 FA2": TABLE}))
    key = kernel_limits.key_of((9, 0), "FA3")
    kernel_limits.write_limits(key, (Limit(None, 700),), path)
    kernel_limits.write_limits(key, (Limit(4096, 2048), Limit(None, 1024)), path)
    assert kernel_limits.read_limits((9, 0), "FA3", path).limits == (Limit(4096, 2048), Limit(None, 1024))
    assert kernel_limits.read_limits((8, 0), "FA2", path) == TABLE
    assert kernel_limits.read_limits((9, 0), "FA2", path) == kernel_limits.read_limits((8, 9), "FA2", path) == BUILT_IN


LAST = {"max_context": None, "max_query": 512}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], "one of them 'default'"),
        ({"9.0 FA2": [LAST]}, "one of them 'default'"),
        ({"default": []}, "default is not a list of limits"),
        ({"default": [{"max_query": 512}]}, "exactly the keys max_context and max_query"),
        ({"default": [{"max_context": None, "max_query": 511}]}, "max_query is 511, not a number of at least 512"),
        ({"default": [{"max_context": None, "max_query": "many"}]}, "max_query is 'many'"),
        ({"default": [{"max_context": 9, "max_query": 512}]}, "max_context of the last limit must be null"),
        ({"default": [LAST, LAST]}, "ascending"),
        ({"default": [{**LAST, "max_context": 9}, {**LAST, "max_context": 9}, LAST]}, "ascending"),
    ],
)
def test_an_invalid_file_is_rejected_with_the_part_that_is_wrong(content: object, message: str) -> None:
    with pytest.raises(ValueError, match=f"limits.json.*{message}"):
        kernel_limits.parse(json.dumps(content), "limits.json")


def test_a_file_that_is_not_json_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"limits.json is not JSON"):
        kernel_limits.parse("{", "limits.json")


def test_a_limit_that_captured_steps_would_exceed_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "limits.json"
    path.write_text(text := kernel_limits.written({"default": BUILT_IN}))
    with pytest.raises(ValueError, match="max_query is 64"):
        kernel_limits.write_limits("9.0 FA2", (Limit(None, 64),), path)
    assert path.read_text() == text
