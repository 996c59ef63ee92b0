"""The figures of the router by itself."""

from functools import partial

from benchmarks.evidence.figure import Figure, Over, Suite, raw_value
from benchmarks.load.peers import VLLM_VERSION
from benchmarks.router import clients, four_shards, observed, throughput

most = partial(Figure, at_least=False)
simulated = partial(Suite, model="simulated shard")
GENERATORS = {clients.GO: "a client in Go", clients.VLLM: f"vllm bench serve {VLLM_VERSION}"}
VALUES = dict(
    zip(clients.VALUES, ("tokens/s", "median time to first token", "median inter-token latency"), strict=True)
)

SUITES: tuple[Suite, ...] = (
    simulated("router", throughput.measure, throughput.NUM_ROUNDS,
              (Figure("router throughput, 256 streams", partial(raw_value, "tokens_per_second"), 40_000,
                      unit="tokens/s"),
               most("time to first token added by the router, 64 clients", throughput.added_first_token_ms, 5.0,
                    unit="ms"))),
    simulated("router-shards", four_shards.measure, four_shards.ROUNDS,
              (Figure("throughput of one router over four shards, of four times one", four_shards.share, 0.9),),
              model="simulated shards"),
    simulated("router-observed", observed.measure, observed.ROUNDS,
              (most("processor time of ten viewers of the live view", observed.cost_of_viewers, 0.01,
                    unit="of the router's"),
               most("processor time of traces that are not sampled", observed.cost_of_traces, 0.01,
                    unit="of the router's"))),
    simulated("router-clients", clients.measure, clients.ROUNDS,
              tuple(most(f"{label} that lorikeet-bench measures, over {name}, from 1",
                         partial(clients.distance, value, generator), 0.03, over=Over.POOLED)
                    for generator, name in GENERATORS.items() for value, label in VALUES.items()),
              peer="a client in Go, vllm bench serve"),
)  # fmt: skip
