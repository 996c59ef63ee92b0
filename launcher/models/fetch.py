"""`python -m lorikeet.launcher.models.fetch REQUEST.json`: downloads one model and writes its path.

A separate process, so that the launcher has no threads and a signal can end a download at any time.
"""

import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lorikeet.adapters.refs import Ref, Source
from lorikeet.launcher.exits import Exit, LauncherError
from lorikeet.launcher.models.model import ModelFolder, Use
from lorikeet.proto import logs
from lorikeet.proto.config_file import ConfigFile

TOKEN_VARIABLES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_API_TOKEN")


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
        model = hub.fetch(Ref(Source.HUB, request.id, request.revision), request.code, request.weights, use)
    except LauncherError as error:
        answer: dict[str, Any] = {"error": str(error), "exit": error.exit}
    else:
        answer = {"id": model.id, "path": str(model.path), "sha": model.sha}
    Path(request.answer).write_text(json.dumps(answer))
    return int(answer.get("exit", Exit.OK))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
