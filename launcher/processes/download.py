"""Fetches the base and the draft model before a process starts, and compares their vocabularies.

`python -m lorikeet.launcher.processes.download REQUEST.json` downloads one model and writes its path. It is a process
of its own, so that the launcher has no threads and a signal can end a download at any time.
"""

import json
import logging
import os
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lorikeet.adapters.refs import Ref, SourceKind
from lorikeet.launcher.config.flags import TOKENS_WITH_A_DRAFT
from lorikeet.launcher.config.settings import Settings
from lorikeet.launcher.exits import Exit, LauncherError, refuse
from lorikeet.launcher.models import adapters, demo, model
from lorikeet.launcher.models.model import TOKEN_VARIABLES, DemoModel, GgufModel, ModelFolder, Use
from lorikeet.launcher.processes.supervisor import Signals
from lorikeet.proto import logs
from lorikeet.proto.children import Child
from lorikeet.proto.config_file import ConfigFile
from lorikeet.proto.preload import Preload
from lorikeet.proto.process import environment_of_children
from lorikeet.proto.quantization import reason_against


@dataclass(frozen=True)
class Models:
    """Models on this machine."""

    base: ModelFolder
    draft: ModelFolder | None = None


class _Interrupted(Exception):
    """A signal arrived before everything was fetched."""


def collect(
    settings: Settings, folder: Path, signals: Signals, use: Use, preload: Preload | None = None
) -> Models | None:
    """The models of the settings, downloaded if necessary; None if a signal arrived first.

    `folder` is this run's private one; `use` is that of the base model. Raises LauncherError, also if the draft model
    has another vocabulary.
    """
    weights = not settings["print-config"]
    downloads = _Downloads(settings, folder, signals, preload)
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
    preload: Preload | None = None
    """Forks what reads a .gguf file."""

    def get(self, role: str, named: Ref | ModelFolder | GgufModel | DemoModel, weights: bool, use: Use) -> ModelFolder:
        """The folder of `named`. Raises LauncherError or _Interrupted."""
        if isinstance(named, ModelFolder):
            return named
        if isinstance(named, DemoModel):
            return self._demo(role, named, use)
        answer = self.folder / f"fetched-{role}.json"
        if isinstance(named, GgufModel):
            return self._made_for(role, named, use, answer)
        read = self.settings
        request = FetchRequest(
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
        ending = self._run("the download", "lorikeet.launcher.processes.download", path)
        model = read_answer(answer)
        if model is None:
            raise LauncherError(Exit.DOWNLOAD_ERROR, ending)
        return model

    def _demo(self, role: str, named: DemoModel, use: Use) -> ModelFolder:
        """The demo's model; or, with a warning, the embedded one if it was not named and cannot be downloaded."""
        home = adapters.hub_cache(self.settings, os.environ) / demo.FOLDER
        target = home / demo.NAME
        if not (target / "config.json").is_file():
            try:
                home.mkdir(parents=True, exist_ok=True)
                with tempfile.TemporaryDirectory(dir=home, prefix=".") as scratch:
                    self._prepare_demo(role, use, Path(scratch), target)
            except (LauncherError, OSError) as error:
                if not named.is_default:
                    raise LauncherError(Exit.DOWNLOAD_ERROR, f"{model.DEMO_ID} is not available: {error}") from None
                logging.getLogger("lorikeet.launcher").warning(
                    "demo_unavailable: %s is not available: %s. Instead %s is served, which writes Python and cannot "
                    "hold a conversation. Give --model-id to serve another model",
                    demo.NAME, error, model.EMBEDDED_ID,
                )  # fmt: skip
                return model.embedded()
        return ModelFolder(model.DEMO_ID, target, family=model.DEMO_FAMILY)

    def _prepare_demo(self, role: str, use: Use, scratch: Path, target: Path) -> None:
        """Download the demo's model to `scratch`, and move its folder to `target`. Raises LauncherError or OSError."""
        read, answer = self.settings, self.folder / "demo-answer.json"
        request = demo.DemoRequest(
            file=str(scratch / Path(demo.FILE).name),
            answer=str(answer),
            offline=os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"),
            json_output=read["json-output"],
            log_level=read["log-level"],
            quiet=read["print-config"] or read["download-only"],
        )
        path = self.folder / "demo.json"
        request.write(path)
        ending = self._run("the download of the demo's model", "lorikeet.launcher.models.demo", path)
        content = json.loads(answer.read_text()) if answer.is_file() else {"error": ending}
        if "error" in content:
            raise LauncherError(Exit.DOWNLOAD_ERROR, content["error"])
        log = logging.getLogger("lorikeet.launcher")
        log.info("demo_conversion: writing %s in bfloat16, once. This takes about half a minute", demo.NAME)
        folder = scratch / "folder"
        self._made_for(role, GgufModel(content["path"]), use, self.folder / f"made-{role}.json", plain=folder)
        try:
            os.replace(folder, target)
        except OSError:
            if not (target / "config.json").is_file():  # else another server has prepared it meanwhile
                raise

    def _made_for(self, role: str, file: GgufModel, use: Use, answer: Path, plain: Path | None = None) -> ModelFolder:
        """A folder for a file, which lasts as long as this run; or one with its weights in bfloat16 at `plain`."""
        if reason := reason_against("gguf"):
            raise LauncherError(Exit.DOWNLOAD_ERROR, f"{file.id} cannot be read: {reason}")
        request = {
            "id": file.id,
            "file": str(Path(file.id).resolve()),
            "folder": str(plain or self.folder / f"gguf-{role}"),
            "plain": plain is not None,
            "answer": str(answer),
            "needs_tokenizer": use.needs_tokenizer or role == "draft",
        }
        path = self.folder / f"gguf-{role}.json"
        path.write_text(json.dumps(request))
        ending = self._run("reading the .gguf file", "lorikeet.shard.model.gguf.folder", path, self.preload)
        if not answer.is_file():
            raise LauncherError(Exit.DOWNLOAD_ERROR, ending)
        result = json.loads(answer.read_text())
        if "error" in result:
            refuse(result["error"])
        return ModelFolder(result["id"], Path(result["path"]), is_local=True)

    def _run(self, name: str, module: str, request: Path, preload: Preload | None = None) -> str:
        """Run a module with a request until it ends. Returns how it ended. Raises _Interrupted."""
        child = Child(name, module, request, environment_of_children(os.environ), preload=preload)
        try:
            while child.exit_code is None:
                if self.signals.wait(0.05) is not None:
                    raise _Interrupted
        finally:
            child.kill()
        return child.ending


@dataclass(frozen=True)
class FetchRequest(ConfigFile):
    """What to fetch, and where to write the answer."""

    id: str
    revision: str | None
    code: bool
    """Include Python files."""
    weights: bool
    cache: str | None
    answer: str
    """Path of the answer file."""
    num_ranks: int
    """As in `Use`; so are the next two."""
    max_total_tokens: int | None
    needs_tokenizer: bool
    json_output: bool
    log_level: str
    quiet: bool
    """Log to standard error: standard output is for the result."""

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))


def read_answer(path: Path) -> ModelFolder | None:
    """The answer of a fetch, if it wrote one. Raises LauncherError with its sentence if it failed."""
    if not path.is_file():
        return None
    answer = json.loads(path.read_text())
    if "error" in answer:
        raise LauncherError(Exit(answer["exit"]), answer["error"])
    return ModelFolder(answer["id"], Path(answer["path"]), answer["sha"])


def main(path: str) -> int:
    """Run the request in the file at `path`."""
    request = FetchRequest.read(path)
    log = logs.start_launcher(request.json_output, request.log_level, sys.stderr if request.quiet else sys.stdout)
    if not sys.stderr.isatty():
        # In a log file each refresh of a bar would be a line.
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from lorikeet.launcher.models.hub import Hub

    if request.json_output:
        logs.adopt_libraries()
    token = next((os.environ[name] for name in TOKEN_VARIABLES if os.environ.get(name)), None)
    hub = Hub(token, request.cache, log)
    try:
        use = Use(request.num_ranks, request.max_total_tokens, request.needs_tokenizer)
        model = hub.fetch(Ref(SourceKind.HUB, request.id, request.revision), request.code, request.weights, use)
    except LauncherError as error:
        answer: dict[str, Any] = {"error": str(error), "exit": error.exit}
    else:
        answer = {"id": model.id, "path": str(model.path), "sha": model.sha}
    Path(request.answer).write_text(json.dumps(answer))
    return int(answer.get("exit", Exit.OK))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
