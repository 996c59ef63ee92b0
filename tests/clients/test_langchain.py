"""LangChain's standard integration tests (langchain-tests): each passes, or is skipped for a reason given here."""

import asyncio
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import pytest

from lorikeet.proto.grammars import read_grammar_tokenizer
from tests import tiny_pooled
from tests.clients import environments
from tests.clients.environments import NotInstallable
from tests.clients.scripted_model import TEMPLATE, ScriptedModel
from tests.e2e.launched import Launched
from tests.router.serving import serving

pytestmark = [pytest.mark.clients, pytest.mark.anyio]

PACKAGES = ("langchain-tests", "langchain-openai", "langchain-anthropic")
TESTS = "standard_langchain.py"
NO_FILES = "the model accepts text only"
SKIPPED = {
    "test_image_inputs": NO_FILES,
    "test_image_tool_message": NO_FILES,
    "test_audio_inputs": NO_FILES,
    "test_pdf_inputs": NO_FILES,
    "test_pdf_tool_message": NO_FILES,
    "test_stream_time": "a benchmark of recorded answers",
}
"""Tests skipped on every route to a chat; by the test's name, with the reason."""
SKIPPED_ALONE = {
    ("TestMessages", "test_json_mode"): "Anthropic's API has no JSON without a schema",
    ("TestChatCompletions", "test_anthropic_inputs"): "the blocks are Anthropic's",
    ("TestResponses", "test_anthropic_inputs"): "the blocks are Anthropic's",
}
CHATS = ("TestChatCompletions", "TestResponses", "TestMessages")
KEY = "a-key"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def test_every_standard_test_passes_or_is_skipped_for_a_reason(tmp_path: Path, anyio_backend: str) -> None:
    try:
        python = await asyncio.to_thread(environments.python, "langchain_tests", PACKAGES)
    except NotInstallable as reason:
        pytest.skip(f"langchain-tests cannot be installed: {reason}")
    embedder = tiny_pooled.sentence_transformer(tiny_pooled.make("bert", tmp_path / "embedder"))
    names = ("--served-model-name", "demo", "--served-model-name", "second")
    small = ("--cpu-memory", "256MiB", "--dtype", "float32", "--threads", "1")
    with (
        Launched(*names, *small, "--max-batch-prefill-tokens", "512", API_KEY=KEY) as demo,
        Launched("--model-id", str(embedder), "--served-model-name", "embedder", *small, API_KEY=KEY) as vectors,
    ):
        await asyncio.to_thread(demo.wait_for, "is ready at")
        await asyncio.to_thread(vectors.wait_for, "is ready at")
        async with serving(tmp_path, chat_template=TEMPLATE, served_model_names=("demo", "second")) as scripted:
            scripted.shard.answer = ScriptedModel(scripted, read_grammar_tokenizer(tmp_path / "model", 300))
            urls = {"URL": demo.url, "SCRIPTED_URL": scripted.url, "EMBEDDER_URL": vectors.url}
            found = await asyncio.to_thread(_outcomes, python, tmp_path, urls)
    wrong = {case: outcome for case, outcome in found.items() if outcome not in ("passed", "skipped")}
    assert not wrong, "\n".join(f"{case}: {outcome[-1500:]}" for case, outcome in wrong.items())
    skipped = {case for case, outcome in found.items() if outcome == "skipped"}
    assert skipped == {(chat, name) for chat in CHATS for name in SKIPPED} | SKIPPED_ALONE.keys()
    print(Counter(found.values()))


def _outcomes(python: list[str], folder: Path, urls: dict[str, str]) -> dict[tuple[str, str], str]:
    """How each test of each class ended: passed, skipped, or why it failed."""
    report, settings = folder / "report.xml", folder / "pytest.ini"
    one_loop = ("asyncio_default_test_loop_scope = session", "asyncio_default_fixture_loop_scope = session")
    settings.write_text("\n".join(("[pytest]", "asyncio_mode = auto", *one_loop)))  # langchain-openai keeps its client
    where = ("-c", str(settings), "--rootdir", str(folder), "-p", "no:cacheprovider", f"--junitxml={report}")
    command = [*python, "-m", "pytest", "-q", *where, str(environments.SCRIPTS / TESTS)]
    variables = {**urls, "KEY": KEY, "MODEL": "demo", "SECOND_MODEL": "second"}
    environments.finish(command, variables)
    found: dict[tuple[str, str], str] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        reasons = [part.text or part.get("message", "") for part in case if part.tag in ("failure", "error")]
        outcome = reasons[0] if reasons else "skipped" if case.find("skipped") is not None else "passed"
        name = (case.get("classname", "").rpartition(".")[2], case.get("name", "").partition("[")[0])
        if found.get(name, "passed") in ("passed", "skipped"):
            found[name] = outcome
    return found
