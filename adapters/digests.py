"""Digests, the names of adapters below the router: hashes of their content, or of their parts. Imports no torch."""

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any, Self

from lorikeet.adapters.errors import AdapterInvalid
from lorikeet.adapters.refs import Pin
from lorikeet.proto.numbers import is_number

STRATEGIES = ("linear", "ties", "dare_linear", "dare_ties", "cat")
SIGN_METHODS = ("total", "frequency")
MAX_MERGED = 32


def of_adapter(configuration: bytes, files: bytes) -> str:
    """From the configuration in its canonical form and a hash of the bytes of the weight files."""
    return hashlib.sha256(configuration + b"\0" + files).hexdigest()


@dataclass(frozen=True)
class Merge:
    """Several adapters merged into one, with the parameters of PEFT's `add_weighted_adapter`."""

    pins: tuple[Pin, ...]
    weights: tuple[float, ...]
    strategy: str
    density: float
    """The share of values that are kept (ties and dare)."""
    majority_sign_method: str

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Raises AdapterInvalid with a sentence for the user, or ValueError if a pin is invalid."""
        pins = tuple(Pin.from_dict(pin) for pin in values.get("pins", ()))
        weights = values.get("weights")
        weights = [1.0] * len(pins) if weights is None else weights
        strategy = values.get("strategy", "linear")
        density: Any = values.get("density")
        method = values.get("majority_sign_method") or "total"
        if not 1 <= len(pins) <= MAX_MERGED:
            raise AdapterInvalid(f"{len(pins)} adapters cannot be merged: give 1 to {MAX_MERGED}")
        if not isinstance(weights, list) or len(weights) != len(pins) or not all(map(_is_weight, weights)):
            raise AdapterInvalid(f"`weights` must be a list of {len(pins)} numbers, one per adapter")
        if strategy not in STRATEGIES:
            raise AdapterInvalid(f"the strategy {str(strategy)[:40]!r} is not one of {', '.join(STRATEGIES)}")
        if method not in SIGN_METHODS:
            raise AdapterInvalid(f"the sign method {str(method)[:40]!r} is not one of {', '.join(SIGN_METHODS)}")
        if strategy in ("linear", "cat"):
            density = 1.0
        elif not is_number(density, 1.0) or not density > 0:
            raise AdapterInvalid(f"`{strategy}` needs a density above 0 and up to 1")
        return cls(pins, tuple(map(float, weights)), strategy, float(density), method)

    def as_dict(self) -> dict[str, Any]:
        """What `from_dict` reads."""
        return asdict(self) | {"pins": [pin.as_dict() for pin in self.pins], "weights": list(self.weights)}

    def digest(self, parts: list[str]) -> str:
        """Digest of the merged adapter, from the digests of its parts and the parameters that the strategy uses."""
        method = self.majority_sign_method if self.strategy.endswith("ties") else None
        content = ["merge", parts, self.weights, self.strategy, self.density, method]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _is_weight(value: Any) -> bool:
    return is_number(value, 1e6)
