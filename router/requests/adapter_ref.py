"""The adapter of one request: resolved and authorised, whose content (the digest) may have yet to be read.

Knows how the loader is asked for it; neither sockets nor queues.
"""

import hashlib
import json
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from lorikeet.adapters.refs import Pin


@dataclass(frozen=True)
class Merging:
    """How several adapters become one, in the words of PEFT's `add_weighted_adapter`."""

    weights: tuple[float, ...]
    strategy: str
    density: float | None
    majority_sign_method: str


@dataclass(frozen=True)
class Adapter:
    """What a request runs with beside the base model."""

    name: str
    """As the caller wrote it: an alias, an id, or several with commas between."""
    pins: tuple[Pin, ...]
    merging: Merging | None = None
    token: str | None = field(default=None, repr=False, compare=False)
    """The source's token with which it was authorised."""
    alias: str = ""
    """Empty for an adapter that the catalogue does not list."""
    weight: float = 1.0
    """Its share of the queue."""
    chat_template: str | None = field(default=None, repr=False, compare=False)
    """The operator's, which goes before the adapter's own."""

    @cached_property
    def content(self) -> str:
        """The same for requests whose adapters have the same content."""
        if self.merging is None:
            (pin,) = self.pins
            return f"{pin.source.value}:{pin.id}@{pin.revision}"
        return "merge:" + hashlib.sha256(json.dumps(self.call, sort_keys=True).encode()).hexdigest()

    @cached_property
    def flow(self) -> str:
        """The queue it waits in."""
        return f"{self.alias}|{self.content}"

    @property
    def call(self) -> dict[str, Any]:
        """What the loader is asked for."""
        if self.merging is None:
            return {"fetch": self.pins[0].as_dict()}
        return {
            "merge": {
                "pins": [pin.as_dict() for pin in self.pins],
                "weights": list(self.merging.weights),
                "strategy": self.merging.strategy,
                "density": self.merging.density,
                "majority_sign_method": self.merging.majority_sign_method,
            }
        }

    @property
    def source(self) -> str:
        """Of the first one, as LoRAX has it."""
        return self.pins[0].source.value

    @property
    def revision(self) -> str:
        return ",".join(pin.revision for pin in self.pins)


@dataclass(frozen=True)
class Loaded:
    """What the loader said of an adapter whose file lies in the store now."""

    digest: str
    num_bytes: int
    rank: int
    tier: str
    """Where it came from: `source` or `disk`."""
    num_heads: int = 0
    """Medusa heads in it."""

    @property
    def is_heads_only(self) -> bool:
        """Whether it changes nothing of what the base model says."""
        return self.num_heads > 0 and self.rank == 0


@dataclass(frozen=True)
class Heads:
    """Medusa heads that guess beside a request's adapter."""

    adapter: Adapter
    """That brings them; nothing else of it is used."""
    content: Loaded | None = None
    """Of heads that the operator has for everybody, who keeps them loaded: they step back for the adapter's own."""
