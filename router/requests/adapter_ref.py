"""The adapter of one request: its name is resolved and authorised, its content (the digest) may not be loaded yet."""

import hashlib
import json
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from lorikeet.adapters.refs import Pin


@dataclass(frozen=True)
class Merging:
    """How several adapters are merged; the parameters of PEFT's `add_weighted_adapter`."""

    weights: tuple[float, ...]
    strategy: str
    density: float | None
    majority_sign_method: str


@dataclass(frozen=True)
class Adapter:
    """An adapter, or several to merge, that a request uses."""

    name: str
    """As given by the caller: an alias, an id, or several separated by commas."""
    pins: tuple[Pin, ...]
    merging: Merging | None = None
    token: str | None = field(default=None, repr=False, compare=False)
    """The token that authorised access at the source."""
    tokens: tuple[str | None, ...] = field(default=(), repr=False, compare=False)
    """Access tokens for the parts of a merge: none for public parts, the operator's for its own."""
    alias: str = ""
    """Empty for an adapter that the catalogue does not list."""
    weight: float = 1.0
    """Weight of the adapter's flow in the fair queue."""
    chat_template: str | None = field(default=None, repr=False, compare=False)
    """The operator's, which takes precedence over the adapter's own."""
    caller: str = field(default="", compare=False)
    """The caller's identity, which has turns of its own in the loader; "" for the operator's adapters."""

    @cached_property
    def content(self) -> str:
        """A key that is equal for adapters of equal content."""
        if self.merging is None:
            (pin,) = self.pins
            return f"{pin.source.value}:{pin.id}@{pin.revision}"
        return "merge:" + hashlib.sha256(json.dumps(self.call, sort_keys=True).encode()).hexdigest()

    @cached_property
    def flow(self) -> str:
        """Its flow in the fair queue."""
        return f"{self.alias}|{self.content}"

    @property
    def load_call(self) -> dict[str, Any]:
        """The call to the loader, for this caller."""
        tokens = {} if self.merging is None else {"tokens": list(self.tokens)}
        return {**self.call, "token": self.token, **tokens, "caller": self.caller}

    @property
    def call(self) -> dict[str, Any]:
        """The call to the loader, equal for adapters of equal content."""
        if self.merging is None:
            return {"fetch": self.pins[0].as_dict()}
        return {"merge": {"pins": [pin.as_dict() for pin in self.pins], **asdict(self.merging)}}

    @property
    def source(self) -> str:
        """Source of the first adapter, as LoRAX reports it."""
        return self.pins[0].source.value

    @property
    def revision(self) -> str:
        return ",".join(pin.revision for pin in self.pins)


@dataclass(frozen=True)
class Loaded:
    """An adapter whose file is in the loader's store."""

    digest: str
    num_bytes: int
    rank: int
    tier: str
    """Where it was loaded from: `source` or `disk`."""
    num_heads: int = 0
    """Number of Medusa heads."""
    invocation_ids: tuple[int, ...] = ()
    """Token ids that activate an activated LoRA (aLoRA): it applies from their last occurrence in the prompt on."""

    @property
    def is_heads_only(self) -> bool:
        """Whether it leaves the base model's output unchanged."""
        return self.num_heads > 0 and self.rank == 0


@dataclass(frozen=True)
class Heads:
    """Medusa heads that propose draft tokens for a request in addition to its adapter."""

    adapter: Adapter
    """That contains them; only its heads are used."""
    content: Loaded | None = None
    """Content of the operator's default heads, which stay loaded; the adapter's own heads precede these."""
