"""What a shard's log says of its start."""

import json

from benchmarks.cuda.check import start


def test_graphs_of_target_and_draft_model_add_up() -> None:
    lines = [
        {"event": "device_memory", "allocated_bytes": 7, "other_bytes": 250_000_000},
        {"event": "kv_memory", "num_tokens": 2048},
        {"event": "graphs_captured", "seconds": 9.5, "num_graphs": 20, "bytes": 100, "level": "info"},
        {"event": "graphs_captured", "seconds": 2.5, "num_graphs": 10, "bytes": 50, "level": "info"},
        {"event": "ready"},
    ]
    text = "a line of a library\n" + "\n".join(map(json.dumps, lines))
    found = start.events(text)
    graphs = {"seconds": 12.0, "num_graphs": 30, "bytes": 150}
    assert found == {"context_bytes": 250_000_000, "num_kv_tokens": 2048, "graphs": graphs}
    assert start.context_over_declared(found) == 0.5 and start.graphs_over_declared(found) == 150 / 250_000_000
    assert start.context_over_declared({}) == start.graphs_over_declared({}) == 0.0
    assert start.capture_s(found) == 12.0
    assert start.capture_s({}) == 0.0
