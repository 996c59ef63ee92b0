"""One shard as the dispatcher sees it: its stream, the requests that run on it and their messages, its credit, what it
has cached, and when batches are sent to it.

Ids, credit and residency belong to one stream; each new one resets them. Requests that arrive within one step of the
shard travel in at most two messages: during a step a new request could only wait in the shard, so one message gathers
requests until shortly before the step should end, and another follows the step's own output. An idle shard gets the
first request at once. One that has just become idle gets it a moment later: clients whose requests ended together often
send the next ones together, and a request that misses the first message waits a whole step.
"""

import asyncio
import hashlib
import itertools
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from pathlib import Path

from lorikeet.proto import shard_pb2 as pb
from lorikeet.router.config import RouterConfig
from lorikeet.router.errors import ValidationError
from lorikeet.router.requests.generation import Generation
from lorikeet.router.requests.request import Adapter, GenerationRequest
from lorikeet.router.shards.client import ShardAccess, ShardClient


class CreditAccount:
    """Requests and KV tokens that one shard could start within its next few steps."""

    def __init__(self) -> None:
        self.num_requests = 0
        self.num_kv_tokens = 0
        self.known = False
        """Whether the shard has reported credit on this stream."""
        self._num_acknowledged = 0
        self._unseen: deque[int] = deque()
        """KV tokens of each request that the shard had not counted yet, oldest first."""

    def sent(self, num_tokens: int) -> None:
        """A request with a prompt of `num_tokens` was sent."""
        self._unseen.append(num_tokens)
        self.num_requests -= 1
        self.num_kv_tokens -= num_tokens

    def taken_back(self, num_tokens: int) -> None:
        """A request that has so many tokens was aborted to make room: the next report will say so."""
        self.num_requests += 1
        self.num_kv_tokens += num_tokens

    def update(self, num_requests: int, num_kv_tokens: int, acknowledged: int) -> None:
        """The shard's report, which counts the first `acknowledged` requests of this stream."""
        for _ in range(min(acknowledged - self._num_acknowledged, len(self._unseen))):
            self._unseen.popleft()
        self._num_acknowledged = max(self._num_acknowledged, acknowledged)
        self.num_requests = num_requests - len(self._unseen)
        self.num_kv_tokens = num_kv_tokens - sum(self._unseen)
        self.known = True

    @property
    def num_unseen(self) -> int:
        return len(self._unseen)

    def covers(self, num_tokens: int) -> bool:
        """Whether a request with a prompt of `num_tokens` could start."""
        return self.num_requests > 0 and self.num_kv_tokens >= num_tokens


MARGIN_SECONDS, MARGIN = 0.002, 0.15
"""How long before the end of the step a batch should arrive, in seconds and as a fraction of the step."""
RETURNING_SECONDS = 0.05
"""How long after its last request ended clients are expected to send the next ones."""
QUIET_SECONDS = 0.0015
LONGEST_GATHER_SECONDS = 0.005


class SendTiming:
    """Send times of one shard, in seconds of one monotonic clock."""

    def __init__(self) -> None:
        self._step_began = -math.inf
        self._step_seconds = 0.0
        """The expected duration of the running step."""
        self._has_sent = True
        """Whether a message was sent during the running step, or started it."""
        self._idle_since = -math.inf
        self._first_arrival = -math.inf
        """Arrival of the first of the queued requests."""
        self._last_arrival = -math.inf

    def on_arrival(self, now: float, is_first: bool) -> None:
        """A request was queued; `is_first` when the queue was empty."""
        self._last_arrival = now
        if is_first:
            self._first_arrival = now

    def on_step(self, now: float) -> None:
        """The shard reported a step and has started the next one."""
        self._step_began = now
        self._has_sent = False

    def set_step_time(self, seconds: float) -> None:
        """The shard's estimate for the running step."""
        self._step_seconds = seconds

    def on_idle(self, now: float) -> None:
        """The shard's last request ended."""
        self._idle_since = now

    def send_at(self, now: float, shard_idle: bool) -> float:
        """The time from which requests may be sent; `inf` stands for the shard's next output."""
        if not shard_idle:
            margin = max(MARGIN_SECONDS, MARGIN * self._step_seconds)
            has_passed = self._has_sent or self._step_seconds <= 2 * margin
            return math.inf if has_passed else self._step_began + self._step_seconds - margin
        if now - self._idle_since > RETURNING_SECONDS:
            return now
        return min(self._last_arrival + QUIET_SECONDS, self._first_arrival + LONGEST_GATHER_SECONDS)

    def on_send(self) -> None:
        """Requests were sent during a step, or started one."""
        self._has_sent = True


BLOCK = 32
"""Tokens per key."""
MAX_BLOCKS = 128
"""Maximum blocks of one prompt that get keys: longer common prefixes make no difference."""


class AdapterResidency:
    """Where adapters are, as the shard's AdapterState messages report: resident, loading, or requested."""

    def __init__(self) -> None:
        self._states: dict[str, int] = {}
        """By digest, without absent ones."""
        self.in_host_memory: set[str] = set()
        """Adapters that have left their slot, and are still in the shard's memory."""

    def prefetch(self, digest: str) -> bool:
        """Whether the shard needs a prefetch of `digest`, which counts as loading from now on."""
        if digest in self._states:
            return False
        self._states[digest] = pb.AdapterState.LOADING
        return True

    def update(self, state: pb.AdapterState) -> bool:
        """Take a report; True where it says that a resident adapter was evicted."""
        if state.residency == pb.AdapterState.HOST_MEMORY:
            self.in_host_memory.add(state.digest)
        else:
            self.in_host_memory.discard(state.digest)
        if state.residency in (pb.AdapterState.RESIDENT, pb.AdapterState.LOADING):
            self._states[state.digest] = state.residency
            return False
        return self._states.pop(state.digest, None) == pb.AdapterState.RESIDENT

    def is_resident(self, digest: str) -> bool:
        return self._states.get(digest) == pb.AdapterState.RESIDENT

    def tier(self, digests: Sequence[str], elsewhere: str) -> str:
        """Where all of these adapters are here: `slot` or `host`; `elsewhere` where the shard lacks one."""
        if all(map(self.is_resident, digests)):
            return "slot"
        held = (self.is_resident(digest) or digest in self.in_host_memory for digest in digests)
        return "host" if all(held) else elsewhere

    @property
    def loading(self) -> list[str]:
        """Digests of adapters on their way into a slot."""
        return [digest for digest, state in self._states.items() if state == pb.AdapterState.LOADING]

    @property
    def num_resident(self) -> int:
        return sum(state == pb.AdapterState.RESIDENT for state in self._states.values())


def keys_of(prompt_ids: Sequence[int], content: str, salt: str) -> tuple[int, ...]:
    """One key per full block, of all tokens up to its end, of the adapter's content and of the salt."""
    keys = []
    key = hash((content, salt))
    for start in range(0, min(len(prompt_ids) - BLOCK, MAX_BLOCKS * BLOCK) + 1, BLOCK):
        key = hash((key, *prompt_ids[start : start + BLOCK]))
        keys.append(key)
    return tuple(keys)


class PrefixIndex:
    """Blocks of prompts that should still be in the shard's cache, estimated from what was sent."""

    def __init__(self, num_tokens: int) -> None:
        """`num_tokens`: the size of the cache."""
        self._max_keys = num_tokens // BLOCK
        self._keys: OrderedDict[int, None] = OrderedDict()

    def add(self, keys: Sequence[int]) -> None:
        """A prompt with these keys was sent to the shard."""
        for key in reversed(keys):  # the end of a prompt is evicted first
            self._keys[key] = None
            self._keys.move_to_end(key)
        while len(self._keys) > self._max_keys:
            self._keys.popitem(last=False)

    def num_shared(self, keys: Sequence[int]) -> int:
        """Leading blocks of a prompt that should be in the cache."""
        return next((index for index, key in enumerate(keys) if key not in self._keys), len(keys))


class ShardLink:
    """Keeps one stream to one shard."""

    def __init__(self, index: int, address: str, name: str, access: ShardAccess, config: RouterConfig) -> None:
        """`name` is that of the certificate, where it is not the address's."""
        self.index = index
        self.address = address
        self.client = ShardClient(address, config.step_timeout_s, access, name)
        self.info: pb.ShardInfo | None = None
        """None before the first connection."""
        self.running: dict[int, Generation] = {}
        """Running requests by their id on the wire."""
        self.num_by_affinity: Counter[str] = Counter()
        """Number of running requests by their affinity key."""
        self.num_by_caller: Counter[str] = Counter()
        self._stuck_file = config.stuck_files[index] if index < len(config.stuck_files) else ""
        """Created to ask the process that started the shard to kill it, because it hangs."""
        self._reset(num_cached_tokens=0)

    def _reset(self, num_cached_tokens: int) -> None:
        self.credit = CreditAccount()
        self.send_timing = SendTiming()
        self.residency = AdapterResidency()
        self.prefixes = PrefixIndex(num_cached_tokens)
        self.step_requests: frozenset[int] = frozenset()
        """Wire ids of the requests that the current step computes, as far as was reported."""
        self.load: pb.Load | None = None
        """The last report."""
        self.step_detail: pb.StepDetail | None = None
        """Details of a recent step, while `watch` asks for them."""
        self._wire_ids = itertools.count(1)
        self._last_step = 0
        self._has_steps = True
        self._digest: asyncio.Future[str] | None = None

    @property
    def is_idle(self) -> bool:
        """Whether no step runs there, as far as is known: nothing was sent, or all requests wait for adapters."""
        return not self.running or not (self._has_steps or self.credit.num_unseen)

    @property
    def ready(self) -> bool:
        """Whether a request could be sent."""
        return self.client.connected and self.client.serving and self.credit.known

    def has_room(self, num_tokens: int) -> bool:
        """An idle shard gets a request whatever its credit is: it either runs it or returns why it cannot."""
        return self.ready and (self.credit.covers(num_tokens) or (not self.running and self.credit.num_unseen == 0))

    def add(self, generation: Generation, now: float) -> None:
        """The request runs here from now on."""
        wire_id = next(self._wire_ids)
        generation.routing.place(self.address, wire_id, now)
        self.running[wire_id] = generation
        self.num_by_affinity[generation.adapters.affinity_key] += 1
        self.num_by_caller[generation.request.caller] += 1
        self.credit.sent(generation.num_known)

    def abort(self, generation: Generation, now: float) -> bool:
        """End a request that runs here; False for one that does not."""
        wire_id = generation.routing.wire_id
        if wire_id not in self.running:
            return False
        self.remove(wire_id, now)
        self.client.abort(wire_id)
        return True

    def remove(self, wire_id: int, now: float) -> None:
        """The request is over."""
        generation = self.running.pop(wire_id)
        _decrement(self.num_by_affinity, generation.adapters.affinity_key)
        _decrement(self.num_by_caller, generation.request.caller)
        if not self.running:
            self.send_timing.on_idle(now)

    def digest(self) -> "asyncio.Future[str]":
        """Digest of the files of the shard's model: requested once per stream, and kept after its end."""
        if self._digest is None:
            self._digest = asyncio.ensure_future(self.client.digest())
            self._digest.add_done_callback(self._on_digest)
        return self._digest

    def _on_digest(self, call: "asyncio.Future[str]") -> None:
        """One that failed is requested again."""
        if (call.cancelled() or call.exception() is not None) and self._digest is call:
            self._digest = None

    @property
    def known_digest(self) -> str:
        """The model's digest, "" before it has arrived."""
        call = self._digest
        if call is None or not call.done() or call.cancelled() or call.exception() is not None:
            return ""
        return call.result()

    def watch(self, milliseconds: int) -> None:
        """Have the shard describe some of its steps for so long."""
        if self.client.connected:
            self.client.send(pb.Command(watch_ms=milliseconds))

    def update(self, output: pb.StepOutput, now: float) -> bool:
        """Take the shard's state from a message; True where a step has ended since the previous message."""
        if output.HasField("credit"):
            credit = output.credit
            self.credit.update(credit.num_requests, credit.num_kv_tokens, credit.acknowledged)
        if output.HasField("load"):
            self.send_timing.set_step_time(output.load.expected_ms / 1000)
            self._has_steps = output.load.num_running > 0
            self.load = output.load
        if output.HasField("step_requests"):
            self.step_requests = frozenset(output.step_requests.ids)
        if output.HasField("step_detail"):
            self.step_detail = output.step_detail
        if output.step <= self._last_step:
            return False
        self._last_step = output.step
        self.send_timing.on_step(now)
        return True

    def connect(self, info: pb.ShardInfo) -> None:
        """A new stream is open: ids and credit of earlier ones are void."""
        self.info = info
        self._reset(info.num_pages * info.page_size if info.prefix_caching else 0)

    def disconnect(self) -> list[Generation]:
        """The stream has ended. Returns the requests that ran on it, the first one sent first."""
        self.credit = CreditAccount()
        self.residency = AdapterResidency()
        if self.client.is_taken_out and self._stuck_file:
            Path(self._stuck_file).touch()
        lost = list(self.running.values())
        self.running.clear()
        self.num_by_affinity.clear()
        self.num_by_caller.clear()
        return lost


def _decrement(counts: Counter[str], key: str) -> None:
    counts[key] -= 1
    if not counts[key]:
        del counts[key]


MAX_SUBMIT_BYTES = 4 << 20
"""The limit of a shard on one message."""
_OTHER_BYTES = 64 << 10
"""Enough for all fields of a Submit but token ids, biases, the salt and a grammar."""
_MAX_SHOWN = 256
"""Characters of names that are for logs."""


def adapter_pin(adapter: Adapter, digest: str) -> pb.AdapterPin:
    """The shard identifies the adapter by its digest; the other fields are for logs."""
    ids = ",".join(pin.id for pin in adapter.pins)[:_MAX_SHOWN]
    return pb.AdapterPin(source=adapter.source, id=ids, revision=adapter.revision[:_MAX_SHOWN], digest=digest)


def opaque(caller: str) -> str:
    """What shards know of a caller: the same one through every router. Empty where a request has none."""
    return hashlib.blake2b(caller.encode(errors="surrogatepass"), digest_size=8).hexdigest() if caller else ""


def check_size(request: GenerationRequest, vocab_size: int) -> None:
    """Raises ValidationError where the Submit message of a request could become larger than a shard accepts.

    After the loss of a shard it contains the output so far.
    """
    bytes_per_id = -(-max(vocab_size - 1, 1).bit_length() // 7)
    num_ids = len(request.prompt_ids) + request.max_new_tokens + len(request.speculation.prediction_ids)
    texts = request.cache_salt + ("" if request.grammar is None else request.grammar.text)
    most = (MAX_SUBMIT_BYTES - _OTHER_BYTES - len(texts.encode())) // bytes_per_id
    most -= 10 * len(request.sampling.logit_bias) + len(request.sampling.allowed_ids) + 2 * len(request.stop_token_ids)
    most -= sum(len(word) + 4 for word in request.sampling.bad_words)
    if num_ids > most:
        raise ValidationError(
            f"prompt, output and `prediction` may have {most} tokens together, which is what fits a message to a "
            f"shard. Given: {num_ids}"
        )


def submit_message(generation: Generation, deadline_ms: int = 0) -> pb.Submit:
    """Message that submits an admitted request; `deadline_ms` from now, 0 for none."""
    request, adapters = generation.request, generation.adapters
    adapter, heads = adapters.adapter_pin, adapters.heads_pin
    submit = pb.Submit(
        id=generation.routing.wire_id,
        prompt_ids=generation.known_ids,
        num_emitted=len(generation.emitted_ids),
        max_new_tokens=request.max_new_tokens,
        stop_ids=generation.end_ids,
        deadline_ms=deadline_ms,
        cache_salt=request.cache_salt,
        tenant=request.tenant,
        learning_tenant=request.learning_tenant,
        caller=opaque(request.caller),
        share=request.share,
        adapter=None if adapter is None else adapter_pin(*adapter),
        adapter_start=0 if adapter is None else adapters.start,
        heads=None if heads is None else adapter_pin(*heads),
        isolation_steps=generation.routing.poison_tracker.isolation_steps,
    )
    request.sampling.to_wire(submit)
    request.logprobs.to_wire(submit)
    if generation.emitted_ids:
        submit.logprobs.prefill = False  # they were sent before the first token
    submit.num_virtual = adapters.num_virtual
    if adapters.composition is not None:
        adapters.composition.to_wire(submit)
    if adapters.can_speculate:
        request.speculation.to_wire(submit)
    if request.grammar is not None:
        request.grammar.to_wire(submit)
    if request.pooling is not None:
        request.pooling.to_wire(submit)
    return submit
