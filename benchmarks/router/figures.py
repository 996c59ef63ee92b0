"""The figures of the router by itself."""

from functools import partial

from benchmarks.evidence.figure import Figure, Suite, raw_value
from benchmarks.router import four_shards, throughput

most = partial(Figure, at_least=False)
simulated = partial(Suite, model="simulated shard")

SUITES: tuple[Suite, ...] = (
    simulated("router", throughput.measure, throughput.NUM_ROUNDS,
              (Figure("router throughput, 256 streams", partial(raw_value, "tokens_per_second"), 40_000,
                      unit="tokens/s"),
               most("time to first token added by the router, 64 clients", throughput.added_first_token_ms, 5.0,
                    unit="ms"))),
    simulated("router-shards", four_shards.measure, four_shards.ROUNDS,
              (Figure("throughput of one router over four shards, of four times one", four_shards.share, 0.9),),
              model="simulated shards"),
)  # fmt: skip
