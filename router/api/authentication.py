"""Admits requests by the server's API keys, within each key's limits, and limits failed keys per address."""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from starlette.requests import Request

from lorikeet.adapters.keys import Key
from lorikeet.router.adapters.selection import Selection
from lorikeet.router.api.pages import is_page
from lorikeet.router.config import RouterConfig
from lorikeet.router.errors import KeyLimitReached, KeyRequired, TooManyFailedKeys, TwoCredentials
from lorikeet.router.requests.generation import Generation
from lorikeet.router.requests.request import caller, offered

MAX_FAILURES = 20
"""Wrong credentials of one address per FAILURE_S; above it the answer to them is 429. A valid key is never limited:
behind one address there may be many clients.
"""
FAILURE_S = 60.0
_MAX_ADDRESSES = 65_536
PROBES = frozenset(("/health", "/healthz", "/livez", "/ping", "/ready", "/readyz", "/startup", "/health_generate"))
"""Paths that tell whether the server works."""
_OPEN = PROBES | {"/docs", "/openapi.json", "/api-doc/openapi.json"}
_OPEN_FOLDER = "/docs/assets/"


class Authentication:
    """Authentication of one router's requests; the keys in force are those of `selection`."""

    def __init__(self, config: RouterConfig, selection: Selection, clock: Callable[[], float] = time.monotonic) -> None:
        self._selection = selection
        self._is_closed = config.has_keys and not config.keys_optional
        self._open = _OPEN | ({"/metrics"} if config.metrics_without_key else set())
        self._failures = _Failures(clock)

    def check(self, request: Request) -> None:
        """Raises KeyRequired, TwoCredentials or TooManyFailedKeys for a request that the server does not admit."""
        path = request.scope["path"]
        if self._is_closed and not (path in self._open or path.startswith(_OPEN_FOLDER) or is_page(request)):
            self._checked(request, KeyRequired())

    def check_admin(self, request: Request, refusal: Exception) -> None:
        """Raises `refusal` for all but administrators, or TooManyFailedKeys."""
        key = self._checked(request, refusal)
        if not key.admin:
            raise refusal

    def _checked(self, request: Request, refusal: Exception) -> Key:
        """The key of a request. Every credential that it presents must be right, wherever it stands."""
        keys, credentials = self._selection.keys, offered(request)
        header, token = credentials
        key = caller(request, keys).key
        is_pair = header is not None and token is not None and header != token
        if is_pair and keys.find(header) is not None and self._selection.is_for_source(token or ""):
            is_pair, credentials = False, (header, None)
        if is_pair or any(credential is not None and keys.find(credential) is None for credential in credentials):
            self._failures.add(getattr(request.state, "address", ""))
            raise TwoCredentials() if is_pair else refusal
        if key is None:
            raise refusal
        return key


class _Failures:
    """Times of wrong credentials by address; the least recent addresses are forgotten above _MAX_ADDRESSES."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._times: OrderedDict[str, list[float]] = OrderedDict()

    def add(self, address: str) -> None:
        """Record one. Raises TooManyFailedKeys."""
        now = self._clock()
        times = [at for at in self._times.get(address, ()) if now - at < FAILURE_S]
        if len(times) >= MAX_FAILURES:
            raise TooManyFailedKeys(FAILURE_S - (now - times[0]))
        self._times[address] = [*times, now]
        self._times.move_to_end(address)
        if len(self._times) > _MAX_ADDRESSES:
            self._times.popitem(last=False)


@dataclass
class _Bucket:
    """What a rate per minute leaves; it starts full and may go below zero."""

    level: float | None = None
    at: float = 0.0

    def refill(self, per_minute: float, now: float) -> float:
        """The level at `now`."""
        level = per_minute if self.level is None else self.level + (now - self.at) * per_minute / 60
        self.level, self.at = min(per_minute, level), now
        return self.level


@dataclass
class _Spent:
    """Requests and tokens that one key may still spend, and its running requests."""

    requests: _Bucket = field(default_factory=_Bucket)
    tokens: _Bucket = field(default_factory=_Bucket)
    num_running: int = 0


class KeyLimits:
    """Counts generation requests and their tokens by the name of the key."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._spent: dict[str, _Spent] = {}

    def begin(self, key: Key) -> None:
        """Count a request, which must be followed by `end`. Raises KeyLimitReached."""
        spent, now = self._spent.setdefault(key.name, _Spent()), self._clock()
        if key.concurrency is not None and spent.num_running >= key.concurrency:
            raise KeyLimitReached(f"{key.concurrency} requests at a time", 1.0)
        if (rate := key.tokens_per_minute) is not None and (level := spent.tokens.refill(rate, now)) <= 0:
            raise KeyLimitReached(f"{rate:g} tokens per minute", 1.0 - level * 60 / rate)
        if (rate := key.requests_per_minute) is not None:
            level = spent.requests.refill(rate, now)
            if level < min(1.0, rate):
                raise KeyLimitReached(f"{rate:g} requests per minute", (min(1.0, rate) - level) * 60 / rate)
            spent.requests.level = level - 1
        spent.num_running += 1

    def end(self, key: Key, generations: Iterable[Generation]) -> None:
        """Count the tokens of a request: each prompt once, and every output."""
        spent, prompts, num_tokens = self._spent[key.name], set[int](), 0
        for generation in generations:
            num_tokens += generation.num_generated
            if id(generation.request.prompt_ids) not in prompts:
                prompts.add(id(generation.request.prompt_ids))
                num_tokens += len(generation.request.prompt_ids)
        spent.num_running -= 1
        if key.tokens_per_minute is not None:
            spent.tokens.level = spent.tokens.refill(key.tokens_per_minute, self._clock()) - num_tokens
