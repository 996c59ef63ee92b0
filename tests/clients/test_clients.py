"""Unmodified clients in their newest versions: `make test-clients`. A client that cannot be installed is skipped."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients import environments
from tests.clients.environments import NotInstallable
from tests.e2e.launched import ROOT, Launched

pytestmark = pytest.mark.clients

KEY = "a key of the server"
BASE = ROOT / "demo" / "base"
PYTHON = {
    "lorax": ("lorax-client",),
    "text_generation": ("text-generation",),
    "openai": ("openai",),
    "anthropic": ("anthropic",),
    "langchain_openai": ("langchain-openai",),
    "langchain_anthropic": ("langchain-anthropic",),
    "litellm": ("litellm",),
    "llama_index": ("llama-index-llms-openai-like",),
    "instructor": ("instructor",),
    "pydantic_ai": ("pydantic-ai-slim[openai,anthropic]",),
    "lm_eval": ("lm-eval[api]",),
    "aiperf": ("aiperf",),
    "guidellm": ("guidellm",),
}
"""Packages by the name of the script that uses them, `use_<name>.py`."""
WITH_OURS = frozenset(("lm_eval",))
"""Clients that are compared with transformers."""


@pytest.fixture(scope="module")
def variables() -> Iterator[dict[str, str]]:
    arguments = [
        "--cpu-memory",
        "256MiB",
        "--served-model-name",
        "demo",
        "--speculative-tokens",
        "3",
        "--dtype",
        "float32",
    ]
    with Launched(*arguments, API_KEY=KEY.replace(" ", "-")) as server:
        server.wait_for("is ready at")
        yield {"URL": server.url, "KEY": KEY.replace(" ", "-"), "MODEL": "demo", "BASE": str(BASE)}


@pytest.mark.parametrize("name", PYTHON)
def test_a_python_client(name: str, variables: dict[str, str]) -> None:
    try:
        command = environments.python(name, PYTHON[name], with_ours=name in WITH_OURS)
    except NotInstallable as reason:
        pytest.skip(f"{PYTHON[name][0]} cannot be installed: {reason}")
    print(environments.run(command, f"use_{name}.py", variables))


def test_openai_for_node(variables: dict[str, str]) -> None:
    try:
        command = environments.node("node", ("openai",))
    except NotInstallable as reason:
        pytest.skip(f"openai for Node.js cannot be installed: {reason}")
    print(environments.run(command, "use_openai.mjs", variables, Path(environments.cache() / "node")))
