"""A reader: one process that does one job at a time, fetches files or turns them into the served layout.

Whatever an adapter's files do to it stays in it. Reads a JSON object per line from its socket and answers each.
"""

import asyncio
import functools
import json
import resource
import signal
import socket
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import structlog

from lorikeet.adapters import digests
from lorikeet.adapters.errors import AdapterError, LoaderFailed, NotServed, SourceUnreachable
from lorikeet.adapters.formats import contents, tokenizer
from lorikeet.adapters.formats.base_values import BaseValues
from lorikeet.adapters.formats.layout import Base, Layout, lay_out, settled, write
from lorikeet.adapters.formats.reader import Reader
from lorikeet.adapters.formats.reading import Found
from lorikeet.adapters.formats.skeleton import Skeleton, base_hash, choose_dtype, weights_hash
from lorikeet.adapters.judging import AdapterValidator, look
from lorikeet.adapters.loader.config import LoaderConfig
from lorikeet.adapters.merging import merge
from lorikeet.adapters.pin import Pin
from lorikeet.adapters.sources.registry import Sources
from lorikeet.adapters.store import Entry, Store

log = structlog.get_logger()

_BYTES_PER_CPU_S = 20 << 20


class Work:
    """What jobs need, made once: the base's skeleton and facts about it."""

    def __init__(self, config: LoaderConfig) -> None:
        """Raises ValueError or OSError where the base cannot be read."""
        self.config = config
        skeleton = Skeleton(config.model_path, config.trust_remote_code)
        self.base = Base(
            hash=base_hash(config.model_path),
            weights_hash=weights_hash(config.model_path),
            dtype=choose_dtype(config.dtype, skeleton.config, config.device),
            kinds=frozenset(config.kinds),
            values=BaseValues(skeleton),
        )
        self.reader = Reader(skeleton)
        self.reader.warm()
        self.tokenizers = tokenizer.Tokenizers(skeleton.model_path)

    def facts(self) -> tuple[str, str, str]:
        """By which the store tells files of this base from others."""
        return self.base.hash, self.base.weights_hash, str(self.base.dtype).removeprefix("torch.")


class Jobs:
    """The jobs of one reader."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._store = Store(work.config.adapter_store, work.config.store_bytes, work.facts())
        self._sources = Sources(work.config.sources)
        self._loop = asyncio.Runner()
        """One for all looks: making a loop and its threads takes longer than a look."""

    def fetch(self, job: dict[str, Any]) -> dict[str, Any]:
        """Bring a pin's files here."""
        pin = Pin.from_dict(job["pin"])
        signal.signal(signal.SIGALRM, functools.partial(_give_up, pin.id))
        folder = self._sources[pin.source].fetch(pin, job.get("token"), Path(job["folder"]), _within)
        return {"folder": str(folder)}

    def check(self, job: dict[str, Any]) -> dict[str, Any]:
        """AdapterValidator a pin by its configuration and the headers of its weights. Nothing is kept."""
        pin = Pin.from_dict(job["pin"])
        seen = self._loop.run(look(self._sources[pin.source], pin, job.get("token")))
        self._allow(0)
        verdict = AdapterValidator.over(self._work.reader, self._work.tokenizers, self._work.base.kinds).validate(seen)
        told = {"rank": verdict.rank, "modules": verdict.num_modules, "num_bytes": verdict.num_bytes}
        return {"verdict": {**told, "num_heads": verdict.num_heads}}

    def convert(self, job: dict[str, Any]) -> dict[str, Any]:
        """Have the store hold the served layout of the files in a folder."""
        folder, limit = Path(job["folder"]), self._work.config.sources.max_adapter_bytes
        with contents.opened(folder, limit) as opened:
            digest = opened.digest
            if self._store.touch(digest):
                return {"entry": self._store.entry(digest).as_dict()}
            self._allow(opened.num_bytes)
            self._work.tokenizers.check(folder)
            layout, notes = opened.lay_out(self._work.reader, self._work.base)
            for note in notes:
                log.warning("an adapter is odd", adapter=job.get("name"), note=note)
            opened.check_unchanged()
            return {"entry": self._put(digest, layout).as_dict()}

    def merge(self, job: dict[str, Any]) -> dict[str, Any]:
        """The same for several adapters as one."""
        limit = self._work.config.sources.max_adapter_bytes
        wanted = digests.Merge.from_dict(job["merge"])
        parts: list[list[Found]] = []
        names: list[str] = []
        with ExitStack() as held:
            for folder in map(Path, job["folders"]):
                opened = held.enter_context(contents.opened(folder, limit))
                if opened.values is None or opened.changes is None or opened.heads is not None:
                    raise NotServed(f"merging adapters with Medusa heads ({opened.heads_name}) is not served")
                names.append(opened.digest)
                self._allow(opened.num_bytes)
                self._work.tokenizers.check(folder)
                parts.append(list(settled(self._work.reader.read(opened.values, opened.changes), self._work.base)))
                opened.check_unchanged()
            digest = wanted.digest(names)
            if self._store.touch(digest):
                return {"entry": self._store.entry(digest).as_dict()}
            self._allow(sum(len(part) for part in parts) << 20)
            layout = lay_out(merge(parts, wanted, digest), self._work.base)
            return {"entry": self._put(digest, layout).as_dict()}

    def _allow(self, num_bytes: int) -> None:
        """Let the next part take so much processor time; then the system ends this process, whatever it is in."""
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_PROF, self._work.config.reading_cpu_s + num_bytes / _BYTES_PER_CPU_S)

    def _put(self, digest: str, layout: Layout) -> Entry:
        num_bytes = self._store.add(digest, lambda path: write(layout, path, digest, self._work.base))
        return Entry(digest, num_bytes, layout.rank, layout.num_heads)


def _within(seconds: float) -> None:
    """Let the next part of a fetch take so long."""
    signal.setitimer(signal.ITIMER_REAL, seconds)


def _give_up(id: str, *_: object) -> None:
    """Raised in the middle of whatever waits, so that it lets go of its files and locks."""
    raise SourceUnreachable(f"the source of {id} takes too long to answer")


def serve(work: Work, connection: socket.socket) -> None:
    """Do jobs until the other end closes."""
    jobs = Jobs(work)
    known = {"fetch": jobs.fetch, "check": jobs.check, "convert": jobs.convert, "merge": jobs.merge}
    with connection.makefile("rwb") as stream:
        for line in stream:
            job = json.loads(line)
            stream.write(json.dumps(_done(known[job["do"]], job)).encode() + b"\n")
            stream.flush()


def _done(do: Any, job: dict[str, Any]) -> dict[str, Any]:
    """The answer, or the fault of this adapter alone, in a sentence that names it."""
    name = str(job.get("name", "the adapter"))
    try:
        answer: dict[str, Any] = do(job)
        return answer
    except AdapterError as error:
        values = error.as_dict()
        if name not in values["message"]:
            values["message"] = f"the adapter {name} cannot be served: {values['message']}"
        return {"error": values}
    except MemoryError:
        return {"error": LoaderFailed(f"there is not enough memory to read {name}", status=503).as_dict()}
    except Exception as error:
        log.exception("adapter not read", adapter=name)
        return {"error": LoaderFailed(f"the loader failed on {name}: {type(error).__name__}").as_dict()}
    finally:
        for timer in (signal.ITIMER_PROF, signal.ITIMER_REAL):
            signal.setitimer(timer, 0)
