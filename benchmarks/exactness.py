"""Exactness and the sampling law at full size, as cases of a proof. The comparisons themselves are those that the tests
run on samples; nothing is compared here.
"""

import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.case import Case, Cases, Raw

NUM_ARCHITECTURES = 30
NUM_DISTRIBUTIONS = 12
TIES_PER_TOKEN = 1 / 10_000
LAW_SEEDS, LAW_PLACES = 40_000, 6
EXACT_SETTINGS: dict[str, Any] = {"architectures": NUM_ARCHITECTURES, "dtype": "float32"}
NUM_ADAPTED = 11
ADAPTER_SETTINGS: dict[str, Any] = {"architectures": NUM_ADAPTED, "dtype": "float32", "slots": [16, 3]}
LAW_SETTINGS: dict[str, Any] = {"laws": NUM_DISTRIBUTIONS, "seeds": LAW_SEEDS, "places": LAW_PLACES}


def architectures(finished: frozenset[str] = frozenset()) -> Cases:
    """One case per architecture: greedy tokens and log probabilities against transformers, in every way of running."""
    from benchmarks.architectures import run  # imports torch, which reading a proof does not need
    from tests import tiny

    for name in tiny.VARIANTS:
        if name in finished:
            continue
        with tempfile.TemporaryDirectory() as folder:
            try:
                yield Case(name, {"runs": run(name, Path(folder))})
            except Exception as failure:  # a failed architecture is a failed case of the run, not its end
                yield Case(name, {"runs": []}, f"{type(failure).__name__}: {failure}"[:500])


def adapters(finished: frozenset[str] = frozenset()) -> Cases:
    """One case per architecture: greedy tokens of a batch of many adapters against PEFT, also with few slots."""
    from benchmarks.adapters_exact import ARCHITECTURES, check

    for name in ARCHITECTURES:
        if name in finished:
            continue
        with tempfile.TemporaryDirectory() as folder:
            try:
                yield Case(name, {"runs": [asdict(tried) for tried in check(name, Path(folder))]})
            except Exception as failure:  # a failed architecture is a failed case of the run, not its end
                yield Case(name, {"runs": []}, f"{type(failure).__name__}: {failure}"[:500])


def share_changed(raw: Raw) -> float:
    return float(min(run["share_changed"] for run in raw["runs"]))


def differences(raw: Raw) -> float:
    return float(sum(len(run["differences"]) for run in raw["runs"]))


def distinct(raw: Raw) -> float:
    return float(min(run["num_distinct"] for run in raw["runs"] if "num_distinct" in run))


def logprob_error(raw: Raw) -> float:
    return float(max(run["worst_logprob"] for run in raw["runs"] if "worst_logprob" in run))


def ties_beyond_allowed(raw: Raw) -> float:
    """Ties less those allowed for so many tokens; over all cases the sum must not be positive."""
    return float(sum(run["num_ties"] - run["num_tokens"] * TIES_PER_TOKEN for run in raw["runs"]))


def distributions(finished: frozenset[str] = frozenset()) -> Cases:
    """One case per transform and combination: χ² tail probabilities of draws, and of pairs of neighbours."""
    import numpy as np

    from tests.shard.sampling import oracle
    from tests.shard.sampling import test_distribution as test_law
    from tests.shard.sampling.drawing import draws

    size = test_law.V
    for name, case in test_law.CASES.items():
        if name in finished:
            continue
        distribution = oracle.distribution(
            test_law.LOGITS, case, test_law.KNOWN[: test_law.NUM_PROMPT], test_law.KNOWN[3:]
        )
        tokens = draws(test_law.LOGITS, case, test_law.KNOWN, test_law.NUM_PROMPT, LAW_SEEDS, LAW_PLACES)
        pairs = np.outer(distribution, distribution)
        places = np.bincount((tokens[:, 0::2] * size + tokens[:, 1::2]).ravel(), minlength=size * size)
        seeds = np.bincount((tokens[0::2] * size + tokens[1::2]).ravel(), minlength=size * size)
        raw = {
            "draws": int(tokens.size),
            "law": oracle.fit(np.bincount(tokens.ravel(), minlength=size), distribution),
            "neighbouring_places": oracle.fit(places, pairs),
            "neighbouring_seeds": oracle.fit(seeds, pairs),
        }
        yield Case(name, raw)


def least_likely(raw: Raw) -> float:
    return float(min(raw["law"], raw["neighbouring_places"], raw["neighbouring_seeds"]))
