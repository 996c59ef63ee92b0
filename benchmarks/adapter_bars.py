"""The bars about adapters and the parts that measure them: cost, waiting, fairness, catalogues, hostility."""

from functools import partial

from benchmarks import (
    adapters_catalogue,
    adapters_cost,
    adapters_fair,
    adapters_hostile,
    adapters_known,
    adapters_loading,
    adapters_peer,
    adapters_switch,
    adapters_tenants,
    adapters_tiers,
)
from benchmarks.case import Bar, Over, Part, raw_value

PARTS: tuple[Part, ...] = (
    Part("adapters-cost", adapters_cost.measure, adapters_cost.SETTINGS),
    Part("adapters-idle", adapters_cost.without, adapters_cost.SETTINGS),
    Part("adapters-peer", adapters_peer.measure, adapters_peer.SETTINGS),
    Part("adapters-loading", adapters_loading.measure, adapters_loading.SETTINGS),
    Part("adapters-tiers", adapters_tiers.measure, adapters_tiers.SETTINGS),
    Part("adapters-flood", adapters_fair.flood, adapters_fair.SETTINGS),
    Part("adapters-weights", adapters_fair.weights, adapters_fair.WEIGHT_SETTINGS),
    Part("adapters-catalogue", adapters_catalogue.measure, adapters_catalogue.SETTINGS),
    Part("adapters-switch", adapters_switch.measure, adapters_switch.SETTINGS),
    Part("adapters-known", adapters_known.measure, adapters_known.SETTINGS),
    Part("adapters-hostile", adapters_hostile.measure, adapters_hostile.SETTINGS),
    Part("adapters-tenants", adapters_tenants.measure, adapters_tenants.SETTINGS),
)

COST: tuple[Bar, ...] = (
    Bar("8 adapters on q, k, v, o against the base", "adapters-cost", adapters_cost.ROUNDS,
        partial(adapters_cost.share, "attention", "base"), 0.88),
    Bar("8 adapters on all linears against the base", "adapters-cost", adapters_cost.ROUNDS,
        partial(adapters_cost.share, "all", "base"), 0.78),
    Bar("256 adapters over 16 slots against 8 resident", "adapters-cost", adapters_cost.ROUNDS,
        partial(adapters_cost.share, "rotation", "attention"), 0.80),
    Bar("requests without an adapter against a server that has none", "adapters-idle", adapters_cost.IDLE_ROUNDS,
        adapters_cost.idle_share, 0.99),
    Bar("times vLLM with the same 8 adapters", "adapters-peer", adapters_peer.ROUNDS, adapters_peer.over_vllm, 4.0),
)  # fmt: skip

WAITING: tuple[Bar, ...] = (
    Bar("p99 between tokens while 64 adapters load, over without", "adapters-loading", adapters_loading.ROUNDS,
        adapters_loading.active, 1.2, at_least=False),
    Bar("the same while all 64 are asked for at once", "adapters-loading", adapters_loading.ROUNDS,
        adapters_loading.active_at_once, None, at_least=False),
    Bar("64 adapters resident on an idle shard, over reading and checking them", "adapters-loading",
        adapters_loading.ROUNDS, adapters_loading.over_plain, 2.0, at_least=False),
    Bar("longest wait for an adapter while both cores are full", "adapters-loading", adapters_loading.ROUNDS,
        adapters_loading.longest_wait, 5.0, at_least=False, unit="s", over=Over.WORST),
    Bar("first token with an adapter from host memory, over resident", "adapters-tiers", adapters_tiers.ROUNDS,
        partial(adapters_tiers.over_resident, "host"), 1.3, at_least=False),
    Bar("first token with an adapter from disk, over resident", "adapters-tiers", adapters_tiers.ROUNDS,
        partial(adapters_tiers.over_resident, "disk"), 3.0, at_least=False),
)  # fmt: skip

FAIR: tuple[Bar, ...] = (
    Bar("others' p99 first token while one adapter floods, over without", "adapters-flood", adapters_fair.FLOOD_ROUNDS,
        adapters_fair.others_wait, 1.5, at_least=False, over=Over.POOLED),
    Bar("distance of the tokens of weight 3 from three times those of weight 1", "adapters-weights",
        adapters_fair.ROUNDS, adapters_fair.off_weight, 0.3, at_least=False),
)  # fmt: skip

CATALOGUE: tuple[Bar, ...] = (
    Bar("check of 200 adapters", "adapters-catalogue", adapters_catalogue.ROUNDS, partial(raw_value, "seconds"), 10.0,
        at_least=False, unit="s"),
    Bar("of 200 adapters misjudged by the check", "adapters-catalogue", adapters_catalogue.ROUNDS,
        adapters_catalogue.num_misjudged, 0, at_least=False, over=Over.SUM),
    Bar("of 200 adapters not served as judged", "adapters-catalogue", adapters_catalogue.ROUNDS,
        adapters_catalogue.num_unlike, 0, at_least=False, over=Over.SUM),
    Bar("failures and texts of another digest in 20 switches of a revision", "adapters-switch",
        adapters_switch.SWITCHES, adapters_switch.num_wrong, 0, at_least=False, over=Over.SUM),
    Bar("10 000 known aliases in the router", "adapters-known", 1, adapters_known.added_mb, 50.0, at_least=False,
        unit="MB", over=Over.WORST),
)  # fmt: skip

HOSTILE: tuple[Bar, ...] = (
    Bar("wrong answers to hostile adapters and fuzzed headers", "adapters-hostile", adapters_hostile.BATCHES,
        adapters_hostile.num_wrong, 0, at_least=False, over=Over.SUM),
    Bar("pages, slots and requests held after them", "adapters-hostile", adapters_hostile.BATCHES,
        adapters_hostile.held, 0, at_least=False, over=Over.WORST),
    Bar("memory that they leave behind", "adapters-hostile", adapters_hostile.BATCHES,
        partial(raw_value, "memory_grown_mb"), 16.0, at_least=False, unit="MB", over=Over.SUM),
    Bar("answers with anything of another tenant's private adapter", "adapters-tenants", len(adapters_tenants.PLACES),
        adapters_tenants.num_wrong, 0, at_least=False, over=Over.SUM),
)  # fmt: skip

BARS: tuple[Bar, ...] = (*COST, *WAITING, *FAIR, *CATALOGUE, *HOSTILE)
