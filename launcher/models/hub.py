"""Models of the Hugging Face hub: the files that are needed, the download, and the cache without a network.

huggingface_hub loads slowly and starts threads, so this runs in a separate process: see `processes/download.py`.
"""

import json
import logging
import re
import sys
import threading
from collections.abc import Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from huggingface_hub import constants, errors

from lorikeet.adapters.errors import first_line
from lorikeet.adapters.refs import Ref
from lorikeet.adapters.sources import hub
from lorikeet.launcher.exits import Exit, LauncherError
from lorikeet.launcher.models import model
from lorikeet.launcher.models.model import ModelFolder, Use, configuration, is_weights
from lorikeet.proto.logs import readable_size

_SMALL = (".json", ".jinja", ".model", ".txt", ".tiktoken")
_AFTER_POOLING = re.compile(r"\d+_[A-Za-z]+(_\d+)?/(config\.json|model\.safetensors|pytorch_model\.bin)")
"""Files of sentence-transformers' modules."""
_NOT_THE_MODEL = ("consolidated", "adapter_", "training_args", "optimizer", "scheduler", "rng_state", "medusa_")
_LISTING_S = 120.0
"""How long the list of a repository's files may take."""


class Hub:
    """The hub, with a token and a cache."""

    def __init__(self, token: str | None, cache: str | None, log: logging.Logger) -> None:
        self._token = token
        self._cache = cache
        self._log = log

    def fetch(self, ref: Ref, code: bool, weights: bool = True, use: Use | None = None) -> ModelFolder:
        """The model `ref`, downloaded if it is not in the cache.

        `code` includes Python files; without `weights` only small files are fetched. Raises LauncherError, before it
        downloads weights that do not suit `use`.
        """
        try:
            sizes = self._listed(ref)
        except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.GatedRepoError) as error:
            raise LauncherError(Exit.DOWNLOAD_ERROR, _why(ref, error, self._token)) from None
        except Exception as error:  # the library passes on errors of the HTTP client that it uses
            return self._cached(ref, weights, error)
        names = choose(sizes, code, weights)
        if use is not None:
            model.check_files(str(ref), sizes, use)
        if weights and not any(is_weights(name) for name in names):
            raise LauncherError(Exit.DOWNLOAD_ERROR, f"{ref} has neither safetensors nor .bin weights")
        if weights and use is not None:
            model.check_config(str(ref), self._configuration(ref), use)
        total = sum(sizes[name] for name in names)
        size = readable_size(total)
        self._log.info("download_started: fetching %d files (%s) of %s from the hub", len(names), size, ref)
        try:
            with self._progress(ref, total):
                path = Path(self._snapshot(ref, names, offline=False))
        except Exception as error:  # as above; the disk may also be full
            raise LauncherError(Exit.DOWNLOAD_ERROR, f"{ref} cannot be downloaded: {first_line(error)}") from None
        return self._checked(ref, path, weights)

    def _configuration(self, ref: Ref) -> dict[str, Any]:
        try:
            path = Path(self._snapshot(ref, ["config.json"], offline=False))
        except Exception as error:  # as above
            raise LauncherError(Exit.DOWNLOAD_ERROR, f"{ref} cannot be downloaded: {first_line(error)}") from None
        return configuration(path)

    def _listed(self, ref: Ref) -> dict[str, int]:
        """Names and sizes of all files of the repository."""
        timeout_s = float(constants.HF_HUB_DOWNLOAD_TIMEOUT)
        listing = hub.describe(ref, hub.Listing, self._token, timeout_s, _LISTING_S)
        return {file.rfilename: file.size or 0 for file in listing.siblings or ()}

    def _progress(self, ref: Ref, total: int) -> AbstractContextManager[None]:
        """Progress bars in a terminal, else log lines."""
        if sys.stderr.isatty():
            return nullcontext()
        cache = Path(self._cache or constants.HF_HUB_CACHE).expanduser()
        return logged(cache / f"models--{ref.id.replace('/', '--')}" / "blobs", total, self._log)

    def _snapshot(self, ref: Ref, names: Iterable[str] | None, offline: bool) -> str:
        path = hub.library().snapshot_download(
            ref.id,
            revision=ref.revision,
            cache_dir=self._cache,
            token=self._token,
            local_files_only=offline,
            allow_patterns=None if names is None else [_escaped(name) for name in names],
        )
        return str(path)

    def _cached(self, ref: Ref, weights: bool, reason: Exception) -> ModelFolder:
        """The model from the cache, because of `reason`."""
        try:
            path = Path(self._snapshot(ref, ["config.json"], offline=True))
        except (errors.LocalEntryNotFoundError, OSError):
            sentence = f"{ref} is not in the cache, and the hub is not reachable: {first_line(reason)}"
            raise LauncherError(Exit.DOWNLOAD_ERROR, sentence) from None
        if not isinstance(reason, errors.OfflineModeIsEnabled):
            why = first_line(reason)
            self._log.warning("hub_unreachable: the hub is not reachable (%s): using %s from the cache", why, ref)
        return self._checked(ref, path, weights)

    def _checked(self, ref: Ref, path: Path, weights: bool) -> ModelFolder:
        missing = missing_files([file.name for file in path.iterdir()], path, weights)
        if missing:
            raise LauncherError(Exit.DOWNLOAD_ERROR, f"{ref} in {path} lacks {', '.join(missing)}")
        return ModelFolder(ref.id, path, path.name)


def choose(names: Collection[str], code: bool, weights: bool = True) -> list[str]:
    """The files among `names` that serving needs: safetensors if there are any, else .bin."""
    top = [name for name in names if "/" not in name]
    chosen = [name for name in top if name.endswith(_SMALL) and not is_weights(name)]
    chosen += [name for name in names if _AFTER_POOLING.fullmatch(name)]
    if code:
        chosen += [name for name in top if name.endswith(".py")]
    if weights:
        chosen += _weights(top, ".safetensors") or _weights(top, ".bin")
    return sorted(chosen)


def missing_files(names: Iterable[str], path: Path, weights: bool) -> list[str]:
    """The files that a model's folder with files `names` lacks."""
    there = set(names)
    missing = [] if "config.json" in there else ["config.json"]
    if not weights:
        return missing
    ending = ".safetensors" if _weights(sorted(there), ".safetensors") else ".bin"
    weight_files = _weights(sorted(there), ending)
    for index in (name for name in weight_files if name.endswith(".index.json")):
        listed = set(json.loads((path / index).read_bytes())["weight_map"].values())
        missing += sorted(listed - there)
    if not any(name.endswith(ending) for name in weight_files) and not missing:
        missing.append("weights")
    return missing


def _weights(names: Iterable[str], ending: str) -> list[str]:
    return [
        name
        for name in names
        if name.removesuffix(".index.json").endswith(ending) and not name.startswith(_NOT_THE_MODEL)
    ]


def _escaped(name: str) -> str:
    """The glob pattern that matches only this name."""
    return "".join(f"[{character}]" if character in "*?[" else character for character in name)


def _why(ref: Ref, error: Exception, token: str | None) -> str:
    if isinstance(error, errors.GatedRepoError):
        return f"{ref} is gated: ask for access at the hub and set HF_TOKEN to a token of that account"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{ref.id} has no revision {ref.revision} at the hub"
    with_token = "with the token of HF_TOKEN" if token else "without a token (a private one needs HF_TOKEN)"
    return f"{ref.id} was not found at the hub {with_token}, nor is there a folder of that name"


INTERVAL_S = 10.0


@contextmanager
def logged(folder: Path, total: int, log: logging.Logger, interval_s: float = INTERVAL_S) -> Iterator[None]:
    """Log the size of `folder`, out of `total` bytes, at intervals until the block ends."""
    ended = threading.Event()

    def report() -> None:
        while not ended.wait(interval_s):
            log.info("download_progress: fetched %s of %s", readable_size(_bytes_in(folder)), readable_size(total))

    thread = threading.Thread(target=report, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _bytes_in(folder: Path) -> int:
    """Disk usage of a folder's files; of a sparse file only what was written."""
    total = 0
    if folder.is_dir():
        for path in folder.iterdir():
            try:
                status = path.stat()
            except FileNotFoundError:  # renamed since it was listed
                continue
            total += min(status.st_size, status.st_blocks * 512)
    return total
