"""Fetches the base and the draft model before a process starts, and compares their vocabularies.

A download runs in a separate process: see fetch.py.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path

from lorikeet.adapters.refs import Ref
from lorikeet.launcher.config.flags.speculation import TOKENS_WITH_A_DRAFT
from lorikeet.launcher.config.settings import Settings
from lorikeet.launcher.exits import Exit, LauncherError, refuse
from lorikeet.launcher.models import fetch, model
from lorikeet.launcher.models.model import GgufModel, ModelFolder, Use
from lorikeet.launcher.processes.process import Child, environment_of_children
from lorikeet.launcher.processes.supervisor import Signals
from lorikeet.proto.quantization import reason_against


@dataclass(frozen=True)
class Models:
    """Models on this machine."""

    base: ModelFolder
    draft: ModelFolder | None = None


class _Interrupted(Exception):
    """A signal arrived before everything was fetched."""


def collect(settings: Settings, folder: Path, signals: Signals, use: Use) -> Models | None:
    """The models of the settings, downloaded if necessary; None if a signal arrived first.

    `folder` is this run's private one; `use` is that of the base model. Raises LauncherError, also if the draft model
    has another vocabulary.
    """
    weights = not settings["print-config"]
    downloads = _Downloads(settings, folder, signals)
    try:
        base = downloads.get("base", model.named(settings), weights and settings["weights-cache-override"] is None, use)
        if settings["draft-model-id"] is None:
            return Models(base)
        named = model.found("draft-model-id", settings["draft-model-id"], settings["draft-revision"])
        draft, tokenizer = downloads.get("draft", named, weights, Use(needs_tokenizer=False)), None
        if settings["draft-tokenizer-id"] is not None:
            named = model.found("draft-tokenizer-id", settings["draft-tokenizer-id"], None)
            tokenizer = downloads.get("tokenizer", named, False, Use(needs_tokenizer=False))
    except _Interrupted:
        return None
    model.check(base, draft, tokenizer)
    return Models(base, draft)


def with_tokens(settings: Settings, draft: ModelFolder | None) -> Settings:
    """The settings with the default number of draft tokens."""
    if draft is None or settings["speculative-tokens"] is not None:
        return settings
    return settings.with_values(speculative_tokens=min(TOKENS_WITH_A_DRAFT, settings["speculative-tokens-max"]))


@dataclass(frozen=True)
class _Downloads:
    """Downloads models in child processes."""

    settings: Settings
    folder: Path
    signals: Signals

    def get(self, role: str, named: Ref | ModelFolder | GgufModel, weights: bool, use: Use) -> ModelFolder:
        """The folder of `named`. Raises LauncherError or _Interrupted."""
        if isinstance(named, ModelFolder):
            return named
        answer = self.folder / f"fetched-{role}.json"
        if isinstance(named, GgufModel):
            return self._made_for(role, named, use, answer)
        read = self.settings
        request = fetch.FetchRequest(
            id=named.id,
            revision=named.revision,
            code=read["trust-remote-code"],
            weights=weights,
            cache=read["huggingface-hub-cache"],
            answer=str(answer),
            num_ranks=use.num_ranks,
            max_total_tokens=use.max_total_tokens,
            needs_tokenizer=use.needs_tokenizer,
            json_output=read["json-output"],
            log_level=read["log-level"],
            quiet=read["print-config"] or read["download-only"],
        )
        path = self.folder / f"fetch-{role}.json"
        request.write(path)
        ending = self._run("the download", "lorikeet.launcher.models.fetch", path)
        found = fetch.read_answer(answer)
        if found is None:
            raise LauncherError(Exit.DOWNLOAD_ERROR, ending)
        return found

    def _made_for(self, role: str, file: GgufModel, use: Use, answer: Path) -> ModelFolder:
        """A folder for a file, which lasts as long as this run."""
        if reason := reason_against("gguf"):
            raise LauncherError(Exit.DOWNLOAD_ERROR, f"{file.id} cannot be read: {reason}")
        request = {
            "id": file.id,
            "file": str(Path(file.id).resolve()),
            "folder": str(self.folder / f"gguf-{role}"),
            "answer": str(answer),
            "needs_tokenizer": use.needs_tokenizer or role == "draft",
        }
        path = self.folder / f"gguf-{role}.json"
        path.write_text(json.dumps(request))
        ending = self._run("reading the .gguf file", "lorikeet.shard.model.gguf.folder", path)
        if not answer.is_file():
            raise LauncherError(Exit.DOWNLOAD_ERROR, ending)
        found = json.loads(answer.read_text())
        if "error" in found:
            refuse(found["error"])
        return ModelFolder(found["id"], Path(found["path"]), is_local=True)

    def _run(self, name: str, module: str, request: Path) -> str:
        """Run a module with a request until it ends. Returns how it ended. Raises _Interrupted."""
        child = Child(name, module, request, environment_of_children(os.environ))
        try:
            while child.exit_code is None:
                if self.signals.wait(0.05) is not None:
                    raise _Interrupted
        finally:
            child.kill()
        return child.ending
