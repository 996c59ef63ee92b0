"""What prompts get of a step of an engine, before and after its steps were timed."""

from pathlib import Path

from lorikeet.shard.config import ShardConfig
from lorikeet.shard.grpc.streams import Inbox, Outbox
from lorikeet.shard.model import load_model
from lorikeet.shard.startup.build import FIRST_CAP, build_engine
from tests import tiny


def test_on_a_cpu_prompts_begin_with_few_tokens_and_follow_the_times_of_steps(tmp_path: Path) -> None:
    config = ShardConfig("tiny", str(tiny.make("llama", tmp_path / "base")), "unix:/dev/null", max_total_tokens=512)
    chunks = build_engine(config, load_model(config), Inbox(), Outbox()).scheduler.prompt_chunks
    assert chunks.choose(9000, num_decoding=1) == chunks.adapter_cap() == FIRST_CAP
    chunks.observe(64, 64, 0.064)
    chunks.observe(0, 8, 0.02)
    assert chunks.choose(9000, num_decoding=1) == 349  # 350 ms for many prompts, at a millisecond a token
    assert chunks.adapter_cap() == 30  # half as long again as a step that only decodes
