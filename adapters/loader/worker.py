"""A worker process: does one job at a time, which downloads files or converts them to the served layout.

Malicious files can affect this process only. It reads one JSON object per line from its socket. It answers each with an
empty object as it starts the job, and with the result.
"""

import asyncio
import functools
import json
import resource
import signal
import socket
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import structlog

from lorikeet.adapters.check import AdapterValidator, read_headers
from lorikeet.adapters.errors import (
    AdapterError,
    AdapterInvalid,
    AdapterTooLarge,
    LoaderFailed,
    NotServed,
    SourceUnreachable,
)
from lorikeet.adapters.formats import configuration
from lorikeet.adapters.formats.base_model import BaseValues, Skeleton, choose_dtype
from lorikeet.adapters.formats.changes import ModuleChange, PlannedReader, merge
from lorikeet.adapters.formats.layout import (
    CHANGES_NOTHING,
    Base,
    Contents,
    ServedLayout,
    decide,
    lay_out,
    open_adapter,
    served_file,
    without_unchanged,
)
from lorikeet.adapters.formats.weights import read_small
from lorikeet.adapters.loader.config import LoaderConfig
from lorikeet.adapters.refs import Merge, Pin
from lorikeet.adapters.sources.base import CONFIG
from lorikeet.adapters.sources.registry import Sources
from lorikeet.adapters.store import Entry, Store
from lorikeet.proto.digest import base_hash, weights_hash
from lorikeet.proto.process import limited_memory

log = structlog.get_logger()

_BYTES_PER_CPU_S, _OPENED_BYTES_PER_CPU_S = 20 << 20, 100 << 20
"""The least that any machine reads, and that it opens: that is a checksum, and a copy of a `.bin`."""
_MEMORY_PER_BYTE = 10
"""Memory per byte of the files: they are mapped, and their tensors converted to float32, merged and cast."""
_MAX_MESSAGE_LEN = 4096
_MAX_GROWTH = 2
"""Most served bytes per byte of the largest permitted files: float16 becomes float32 on CPU."""


class WorkerContext:
    """What all jobs share and the fork server loads once: the base's skeleton, hashes and tokenizer."""

    def __init__(self, config: LoaderConfig) -> None:
        """Raises ValueError or OSError if the base cannot be read."""
        self.config = config
        num_extra = config.adapter_extra_vocab_size
        skeleton = Skeleton(
            config.model_path, config.trust_remote_code, config.pooling or "", config.embedding_dim, num_extra
        )
        self.base = Base(
            hash=base_hash(config.model_path) + (f"+{num_extra}" if num_extra else ""),
            weights_hash=weights_hash(config.model_path),
            dtype=choose_dtype(config.dtype, skeleton.config, config.device),
            kinds=frozenset(config.kinds) - (frozenset() if skeleton.task is None else {"norm"}),
            values=BaseValues(skeleton),
            max_rank=configuration.MOST_RANK[config.device.partition(":")[0]],
        )
        self.reader = PlannedReader(skeleton)
        self.reader.warm()
        self.tokenizers = configuration.Tokenizers(skeleton.model_path)

    def base_key(self) -> tuple[str, str, str]:
        """What identifies files for this base in the store."""
        return self.base.hash, self.base.weights_hash, str(self.base.dtype).removeprefix("torch.")


class WorkerJobs:
    """The jobs of one worker."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._store = Store(context.config.adapter_store, context.config.store_bytes, context.base_key())
        self._sources = Sources(context.config.sources)
        self._max_bytes = context.config.sources.max_adapter_bytes
        self._loop = asyncio.Runner()
        """One for all checks: creating a loop and its threads takes longer than a check."""

    def fetch(self, job: dict[str, Any]) -> dict[str, Any]:
        """Download a pin's files."""
        pin = Pin.from_dict(job["pin"])
        signal.signal(signal.SIGALRM, functools.partial(_time_out, pin.id))
        source, token, folder = self._sources[pin.source], job.get("token"), Path(job["folder"])
        return {"folder": str(self._store.retried(lambda: source.fetch(pin, token, folder, _within)))}

    def check(self, job: dict[str, Any]) -> dict[str, Any]:
        """Validate a pin by its configuration and the headers of its weights. Nothing is stored."""
        pin = Pin.from_dict(job["pin"])
        headers = self._loop.run(read_headers(self._sources[pin.source], pin, job.get("token")))
        self._limit_cpu(0, with_patterns=True)
        context, num_mapped = self._context, sum(head.size for head in headers.heads.values())
        with limited_memory(context.config.reading_memory + num_mapped):
            validation = AdapterValidator(context.reader, context.tokenizers, context.base).validate(headers)
        size = {"num_bytes": validation.num_bytes, "num_heads": validation.num_heads}
        return {"validation": {"rank": validation.rank, "modules": validation.num_modules, **size}}

    def convert(self, job: dict[str, Any]) -> dict[str, Any]:
        """Store the served layout of the files in a folder."""
        folder = Path(job["folder"])
        with self._limited_memory([folder]), self._opened(folder) as opened:
            digest, skeleton = opened.digest, self._context.reader.skeleton
            stored = self._stored(digest)
            if stored is None or skeleton.num_extra:  # equal weights may come with other tokens
                self._limit_cpu(opened.num_bytes, opened.has_patterns, opened.is_folded)
                self._context.tokenizers.check(folder, skeleton.num_ids(opened.num_added(skeleton)))
            if stored is not None:
                self._check_effect(stored.changes_nothing)
                return {"entry": stored.as_dict()}
            served, layout = opened.lay_out(self._context.reader, self._context.base)
            for warning in served.warnings:
                log.warning("adapter_warning", adapter=job.get("name"), warning=warning)
            opened.check_unchanged()
            self._check_effect(layout.changes_nothing)
            return {"entry": self._put(digest, layout).as_dict()}

    def _check_effect(self, changes_nothing: bool) -> None:
        """Raises AdapterInvalid for an adapter that changes nothing, with --strict-adapters."""
        if changes_nothing and self._context.config.sources.strict:
            raise AdapterInvalid(f"{CHANGES_NOTHING} (--strict-adapters)")

    def merge(self, job: dict[str, Any]) -> dict[str, Any]:
        """Store the served layout of several adapters merged into one."""
        merging = Merge.from_dict(job["merge"])
        parts: list[list[ModuleChange]] = []
        digests: list[str] = []
        folders = [Path(folder) for folder in job["folders"]]
        with self._limited_memory(folders), ExitStack() as held:
            for folder in folders:
                opened = held.enter_context(self._opened(folder))
                if opened.values is None or opened.changes is None or opened.heads is not None:
                    raise NotServed(f"merging adapters with Medusa heads ({opened.heads_name}) is not served")
                if configuration.invocation_ids(opened.values):
                    raise NotServed("merging activated LoRA (aLoRA) is not served: it applies from one token on")
                digests.append(opened.digest)
                self._limit_cpu(opened.num_bytes, opened.has_patterns, opened.is_folded)
                self._context.tokenizers.check(folder)
                changes = self._context.reader.read(opened.values, opened.changes)
                parts.append(list(without_unchanged(changes, self._context.base)))
                opened.check_unchanged()
            digest = merging.digest(digests)
            if (stored := self._stored(digest)) is not None:
                return {"entry": stored.as_dict()}
            self._limit_cpu(sum(len(part) for part in parts) << 20)
            layout = lay_out(decide(merge(parts, merging, digest), self._context.base), self._context.base)
            return {"entry": self._put(digest, layout, str(job["caller"])).as_dict()}

    @contextmanager
    def _opened(self, folder: Path) -> Iterator[Contents]:
        """An adapter's files. What they claim to hold may be anything, so opening them has limits of its own."""
        config, num_bytes = self._context.config, self._num_bytes([folder])
        with ExitStack() as held:
            _limit_cpu(config.opening_cpu_s + num_bytes / _OPENED_BYTES_PER_CPU_S)
            with limited_memory(config.opening_memory + _MEMORY_PER_BYTE * num_bytes):
                opened = held.enter_context(open_adapter(folder, self._max_bytes, self._context.reader.skeleton))
            yield opened

    def _limit_cpu(self, num_bytes: int, with_patterns: bool = False, is_folded: bool = False) -> None:
        """Limit the processor time of the next part."""
        config = self._context.config
        seconds = min(config.reading_cpu_s, config.pattern_cpu_s) if with_patterns else config.reading_cpu_s
        seconds = config.folding_cpu_s if is_folded and not with_patterns else seconds
        _limit_cpu(seconds + num_bytes / _BYTES_PER_CPU_S)

    def _num_bytes(self, folders: list[Path]) -> int:
        """Size of a job's files, as far as they may be read."""
        files = [path for folder in folders for path in folder.iterdir() if path.is_file()]
        return min(sum(path.stat().st_size for path in files), len(folders) * self._max_bytes)

    def _limited_memory(self, folders: list[Path]) -> AbstractContextManager[None]:
        """Inside, memory is limited by the size of a job's files."""
        num_bytes = _MEMORY_PER_BYTE * self._num_bytes(folders)
        if any(_is_folded(folder) for folder in folders):
            num_bytes += 2 * self._context.reader.skeleton.num_bytes
        return limited_memory(self._context.config.reading_memory + num_bytes)

    def _stored(self, digest: str) -> Entry | None:
        """What the store has of that content."""
        if self._store.touch(digest) and (self._store.is_intact(digest) or self._store.verify(digest)):
            return self._store.entry(digest)
        return None

    def _put(self, digest: str, layout: ServedLayout, merged_for: str | None = None) -> Entry:
        file = served_file(layout, digest, self._context.base)
        max_bytes = _MAX_GROWTH * self._max_bytes
        if file.num_bytes > max_bytes:
            raise AdapterTooLarge(f"it takes {file.num_bytes} bytes as it is served; this server accepts {max_bytes}")
        num_bytes = self._store.add(digest, file.num_bytes, file.write, merged_for)
        ids, changes_nothing = layout.invocation_ids, layout.changes_nothing
        numbers = num_bytes, layout.rank, layout.num_heads
        return Entry(digest, *numbers, ids, changes_nothing, layout.scaling, layout.num_virtual)


def _is_folded(folder: Path) -> bool:
    """Whether the folder has an adapter of another type than LoRA."""
    try:
        return configuration.is_folded(configuration.parse(read_small(folder / CONFIG)))
    except AdapterError:
        return False


def _limit_cpu(seconds: float) -> None:
    """Limit the processor time from now on; beyond it the system ends this process in any state."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, seconds)


def _within(seconds: float) -> None:
    """Limit the time of the next part of a fetch."""
    signal.setitimer(signal.ITIMER_REAL, seconds)


def _time_out(id: str, *_: object) -> None:
    """Raise in the middle of a blocking call, so that it releases its files and locks."""
    raise SourceUnreachable(f"the source of {id} takes too long to answer")


def serve(context: WorkerContext, connection: socket.socket) -> None:
    """Do jobs until the other end closes."""
    jobs = WorkerJobs(context)
    known = {"fetch": jobs.fetch, "check": jobs.check, "convert": jobs.convert, "merge": jobs.merge}
    with connection.makefile("rwb") as stream:
        for line in stream:
            job = json.loads(line)
            # a caller repeats a job that never started
            stream.write(b"{}\n")
            stream.flush()
            stream.write(json.dumps(_done(known[job["do"]], job)).encode() + b"\n")
            stream.flush()


def _done(do: Any, job: dict[str, Any]) -> dict[str, Any]:
    """The answer, or the error of this adapter in a sentence that names it."""
    name = str(job.get("name", "the adapter"))
    try:
        answer: dict[str, Any] = do(job)
        return answer
    except AdapterError as error:
        values = error.as_dict()
        if name not in values["message"]:
            values["message"] = f"the adapter {name} cannot be served: {values['message']}"
        values["message"] = values["message"][:_MAX_MESSAGE_LEN]
        return {"error": values}
    except MemoryError:
        return {"error": _needs_memory(name).as_dict()}
    except Exception as error:
        if "can't allocate memory" in str(error):  # torch's
            return {"error": _needs_memory(name).as_dict()}
        log.exception("adapter_read_failed", adapter=name)
        return {"error": LoaderFailed(f"the loader failed on {name}: {type(error).__name__}").as_dict()}
    finally:
        for timer in (signal.ITIMER_PROF, signal.ITIMER_REAL):
            signal.setitimer(timer, 0)


def _needs_memory(name: str) -> AdapterTooLarge:
    return AdapterTooLarge(f"the adapter {name} cannot be served: reading it needs more memory than its size explains")
