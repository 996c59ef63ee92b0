"""Clients of embedding and classification models."""

from pathlib import Path

import pytest

from tests import tiny_pooled
from tests.clients import environments
from tests.clients.environments import NotInstallable
from tests.e2e.launched import Launched

pytestmark = pytest.mark.clients

KEY = "a-key"
LABELS = {0: "O", 1: "B-PER", 2: "I-PER", 3: "B-LOC"}


def _run(name: str, packages: tuple[str, ...], script: str, model: Path, *, with_ours: bool = False) -> None:
    """A script against a server of the model in a folder."""
    try:
        command = environments.python(name, packages, with_ours=with_ours)
    except NotInstallable as reason:
        pytest.skip(f"{packages[0]} cannot be installed: {reason}")
    small = ("--cpu-memory", "128MiB", "--dtype", "float32", "--served-model-name", "pooled")
    with Launched("--model-id", str(model), *small, API_KEY=KEY) as server:
        server.wait_for("is ready at")
        variables = {"URL": server.url, "KEY": KEY, "MODEL": "pooled", "BASE": str(model)}
        print(environments.run(command, script, variables))


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_evaluators_of_sentence_transformers(pooling: str, tmp_path: Path) -> None:
    model = tiny_pooled.sentence_transformer(tiny_pooled.make("bert", tmp_path / "bert"), pooling, max_seq_length=100)
    packages = ("sentence-transformers", "requests")
    _run("sentence_transformers", packages, "use_sentence_transformers.py", model, with_ours=True)


def test_lorax_client_embeds(tmp_path: Path) -> None:
    model = tiny_pooled.sentence_transformer(tiny_pooled.make("bert", tmp_path / "bert"))
    _run("lorax", ("lorax-client",), "use_lorax_embed.py", model)


def test_lorax_client_classifies(tmp_path: Path) -> None:
    model = tiny_pooled.make("distilbert", tmp_path / "base", "token-classify", id2label=LABELS)
    _run("lorax", ("lorax-client",), "use_lorax_classify.py", model)
