"""The figures of adapters."""

from functools import partial

from benchmarks.adapters import (
    activated,
    cost,
    fairness,
    goodput,
    loading,
    tiers,
)
from benchmarks.evidence.figure import Figure, Over, Suite
from benchmarks.load.peers import VLLM_VERSION
from benchmarks.load.rounds import OURS, VLLM, speedup

most = partial(Figure, at_least=False)
large = partial(Suite, model="random Llama, 200 M", dtype="bfloat16")

SUITES: tuple[Suite, ...] = (
    large("adapters-cost", cost.measure, cost.ROUNDS,
          (Figure("8 adapters on q, k, v, o over the base", partial(speedup, "attention", "base"), 0.88),
           Figure("8 adapters on all linears over the base", partial(speedup, "all", "base"), 0.90),
           Figure("256 adapters over 16 slots, of 8 resident", partial(speedup, "rotation", "attention"), 0.80))),
    large("adapters-int8", cost.quantized, cost.ROUNDS,
          (Figure("8 adapters on all linears over the base, both int8", partial(speedup, "all", "base"), 0.80),),
          dtype="int8"),
    large("adapters-ranks", cost.mixed_ranks, cost.ROUNDS,
          (most("time per token of a LoRA of rank 8 next to others of rank 64, over next to others of rank 8",
                cost.small_over_alone, 1.05),)),
    large("alora-first-token", activated.measure, activated.ROUNDS,
          (most("time to first token of an activated LoRA over the base model, after 2048 tokens",
                partial(activated.ratio, activated.ACTIVATED, activated.BASE), 1.15),
           Figure("time to first token of the same weights as LoRA over activated LoRA, after 2048 tokens",
                  partial(activated.ratio, activated.PLAIN, activated.ACTIVATED), 20.0, unit="×"))),
    large("alora-mixed", activated.mixed, activated.MIXED_ROUNDS,
          (Figure("throughput of base, LoRA and activated LoRA in one batch over LoRA alone",
                  partial(speedup, activated.MIXED, activated.LORA), 1.0),)),
    large("adapters-idle", cost.without, cost.IDLE_ROUNDS,
          (Figure("requests without an adapter, over a server without adapters", cost.idle_share, 0.99),)),
    large("adapters-peer", cost.against_vllm, cost.ROUNDS,
          (Figure("throughput over vLLM, 8 adapters", partial(speedup, OURS, VLLM), 6.0, unit="×"),),
          peer=f"vLLM {VLLM_VERSION} (CPU)"),
    large("adapters-loading", loading.measure, loading.ROUNDS,
          (most("p99 time between tokens while 64 adapters load, over without", loading.active, 1.1),
           most("p99 time between tokens while 64 adapters are requested at once, over without",
                loading.active_at_once),
           most("loading 64 adapters on an idle shard, over reading and checking them", loading.over_plain, 2.0),
           most("longest wait for an adapter while both cores are busy", loading.longest_wait, 5.0, unit="s",
                over=Over.WORST))),
    large("adapters-tiers", tiers.measure, tiers.ROUNDS,
          (most("time to first token, adapter in host memory over resident", partial(tiers.over_resident, "host"), 1.3),
           most("time to first token, adapter on disk over resident", partial(tiers.over_resident, "disk"), 3.0),
           most("time to first token, adapter on disk over host memory", tiers.disk_over_host, 1.3))),
    large("adapters-flood", fairness.flood, fairness.FLOOD_ROUNDS,
          (most("p99 time to first token of other adapters during a flood, over without", fairness.others_wait, 1.5,
                over=Over.POOLED),)),
    large("adapters-weights", fairness.weights, fairness.ROUNDS,
          (most("distance of the token ratio from weights 3 and 1", fairness.off_weight, 0.3),)),
    *(
        large(f"adapters-goodput-{count}", partial(goodput.measure, count), 1,
              (Figure(f"highest request rate with {count} adapters, a fifth of them in memory, over all in memory",
                      goodput.share_of_resident, 0.92, over=Over.WORST),),
              void=goodput.void, options={"count": count})
        for count in (1000, 2000)
    ),
)  # fmt: skip
