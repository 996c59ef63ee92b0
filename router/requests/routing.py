"""Where one request runs: its flow in the queue, its shard, its retries, and whether it may be what crashes shards."""

from dataclasses import dataclass, field

ISOLATION_STEPS, ISOLATION_GROWTH = 4, 4
"""Steps that a suspect has to run alone, and the factor by which they grow with each further crash."""
MAX_ISOLATION_STEPS = 4096


@dataclass(slots=True)
class PoisonRequestTracker:
    """Finds a request that crashes shards: the steps of a suspect compute no other request, so a second crash in one of
    them identifies it. Covers all shards that the request ever ran on.
    """

    num_crashes: int = 0
    """Shards that crashed in a step that computed the request."""
    isolation_steps: int = 0
    """Steps that the request still has to run alone."""

    def suspect(self) -> None:
        """A shard crashed before it reported anything of the request."""
        self.isolation_steps = max(self.isolation_steps, ISOLATION_STEPS)

    def record_crash(self) -> bool:
        """A shard crashed in a step that computed the request. True where the request is the cause: it was computed
        alone, and this was not the first crash.
        """
        was_isolated = self.isolation_steps > 0
        self.num_crashes += 1
        self.isolation_steps = min(MAX_ISOLATION_STEPS, ISOLATION_STEPS * ISOLATION_GROWTH ** (self.num_crashes - 1))
        return was_isolated and self.num_crashes > 1

    def record_steps(self, num_steps: int) -> None:
        """Steps that computed the request succeeded."""
        self.isolation_steps = max(0, self.isolation_steps - num_steps)


@dataclass(slots=True)
class Routing:
    """The scheduling state of one request: the dispatcher and the link of its shard write it."""

    number: int
    """Unique in this process; the id on the wire is unique in its stream."""
    flow: str
    """The flow of the fair queue that its tokens are charged to; "" for the base model."""
    queued_at: float
    """time.monotonic(), like the times below."""
    sent_at: float | None = None
    """When it was first sent."""
    waited_s: float | None = None
    """In the queue, until it was first sent."""
    deadline: float | None = None
    """When it fails."""
    shard_address: str = ""
    """Address of the shard that the request runs on, or that completed it; "" while it is queued."""
    wire_id: int = -1
    """The request's id on that shard's stream."""
    has_output: bool = False
    """Whether that shard has sent any output of it."""
    num_retries: int = 0
    """How often it went back into the queue."""
    num_reloads: int = 0
    """How often its adapter was loaded again, because a shard could not read it."""
    last_error: str = ""
    """Why a shard returned it."""
    adapter_tier: str = ""
    """Where its adapter was when it was first sent: `slot` or `host` (memory) of that shard, `disk` or `source`; ""
    without one.
    """
    prefix_keys: tuple[int, ...] | None = None
    """Keys of the prompt's blocks, once computed."""
    poison_tracker: PoisonRequestTracker = field(default_factory=PoisonRequestTracker)

    @property
    def is_queued(self) -> bool:
        return not self.shard_address

    def place(self, shard_address: str, wire_id: int, now: float) -> None:
        """The request is sent to a shard."""
        self.shard_address, self.wire_id, self.has_output = shard_address, wire_id, False
        self.sent_at = now if self.sent_at is None else self.sent_at

    def requeue(self) -> None:
        """Its shard is gone or rejected it."""
        self.shard_address, self.wire_id = "", -1
        self.num_retries += 1
