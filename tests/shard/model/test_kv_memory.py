"""How many pages there are: as asked for, as memory gives, and never too few for one request."""

from dataclasses import replace

import pytest
import torch
from structlog.testing import capture_logs

from lorikeet.shard.config import ShardConfig
from lorikeet.shard.model import load_model
from lorikeet.shard.model.kv_memory import (
    MIN_TOTAL_TOKENS,
    available_bytes,
    choose_num_pages,
    default_slot_bytes,
    largest_step,
    room,
)
from lorikeet.shard.model.model import Model
from tests import tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    config = ShardConfig("tiny", str(tiny.make("llama", tmp_path_factory.mktemp("model"))), "unix:unused")
    return load_model(config)


def choose(model: Model, **values: int) -> int:
    return choose_num_pages(ShardConfig("tiny", "unused", "unix:unused", max_total_tokens=64, **values), model)


def test_a_page_is_as_large_as_the_model_says(model: Model) -> None:
    config = model.network.config
    width = config.num_key_value_heads * config.hidden_size // config.num_attention_heads
    assert model.page_bytes >= 2 * config.num_hidden_layers * width * model.page_size * torch.float32.itemsize


def test_memory_and_limits_determine_the_pages(model: Model) -> None:
    assert choose(model, num_pages=7) == 7
    assert choose(model, cpu_memory=10 * model.page_bytes + 1) == 10
    assert choose(model, cpu_memory=100 * model.page_bytes, max_batch_total_tokens=5 * model.page_size + 1) == 6


def test_no_more_is_taken_than_requests_could_fill(model: Model) -> None:
    pages_per_request = -(-64 // model.page_size)
    assert choose(model, max_running=3, max_waiting=1) == 4 * pages_per_request


def test_too_little_for_one_request_is_an_error(model: Model) -> None:
    with pytest.raises(ValueError, match="--max-total-tokens"):
        choose(model, cpu_memory=model.page_bytes)


def test_the_default_length_of_requests_is_what_memory_holds(model: Model) -> None:
    def choose(num_pages: int, total: int) -> int:
        config = ShardConfig("tiny", "unused", "unix:unused", max_total_tokens=total, fits_kv_memory=True)
        return choose_num_pages(replace(config, num_pages=num_pages), model)

    pages = -(-MIN_TOTAL_TOKENS // model.page_size)
    with capture_logs() as lines:
        assert choose(pages, 1 << 20) == pages
        assert choose(100, 100) == 100
    shown = [line for line in lines if line["event"] == "max_total_tokens"]
    assert [line["tokens"] for line in shown] == [pages * model.page_size, 100]
    with pytest.raises(ValueError, match="of one request"):
        choose(pages - 1, 1 << 20)


@pytest.mark.parametrize(("step_tokens", "longest"), [(4096, 300), (100, 300), (600, 300), (7, 7)])
def test_the_largest_step_has_no_position_that_no_request_has(step_tokens: int, longest: int) -> None:
    """Tables of positions end there, and a device that reads behind them is lost."""
    config = ShardConfig("tiny", "unused", "unix:unused", step_tokens=step_tokens, max_total_tokens=longest)
    segments = largest_step(config, page_size=64)
    assert sum(segment.num_tokens for segment in segments) == step_tokens
    for segment in segments:
        assert 0 < segment.kv_len <= longest
        assert len(segment.page_ids) * 64 >= segment.kv_len


def test_available_memory_is_measured() -> None:
    assert 0 < available_bytes() < 1 << 50


def test_slots_for_adapters_leave_memory_to_kv() -> None:
    """Eight adapters of rank 16, or a part of what the weights leave, but never more than a tenth of the device."""
    assert default_slot_bytes(24 << 30, 8 << 30, rank_bytes=5 << 20) == 128 * 5 << 20
    assert default_slot_bytes(80 << 30, 64 << 30, rank_bytes=5 << 20) == int(0.04 * (64 << 30))
    assert default_slot_bytes(1 << 30, 1 << 29, rank_bytes=5 << 20) == (1 << 30) // 10


def test_what_is_left_of_a_device_is_shared_within_its_limits() -> None:
    config = ShardConfig("tiny", "unused", "unix:unused", cuda_memory_fraction=0.8, memory_wiggle_room=0.5)
    assert room(config, 1000, used=300, step=100) == 200
    assert room(config, 1000, used=800, step=100) == 0
