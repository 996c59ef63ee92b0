"""Every file of examples/, run as its readers do, on the demo models."""

import importlib.util
import io
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lorikeet.launcher import Client, launch
from lorikeet.launcher.__main__ import main
from lorikeet.launcher.cli import generate
from lorikeet.launcher.cli.launching import flag_words
from lorikeet.launcher.config import rules
from lorikeet.launcher.config.settings import read
from tests.e2e.launched import ROOT

EXAMPLES = ROOT / "examples"
SMALL = ["--set", "threads=1", "--set", "cpu-memory=64MiB"]
PAINT = re.compile(r"\x1b\[\d+m")
COUNTS = re.compile(r"(\d+) tokens in .* (\d+) steps .*; accepted (\d+)/\d+ .*; prefill 1(.*); draft \d")


@pytest.fixture(scope="module")
def server() -> Iterator[Client]:
    """The server of rag.yaml; other examples use it too if they would start the same models."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        with launch(config="examples/rag.yaml", threads=1, cpu_memory="64MiB") as client:
            yield client


@pytest.fixture
def example(server: Client, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Loads an example. A server with a draft model is started once; the flags of others are still checked."""

    @contextmanager
    def launching(model: str, draft: str | None = None, **flags: Any) -> Iterator[Client]:
        given = {"model-id": model, "draft-model-id": draft, **{key.replace("_", "-"): flags[key] for key in flags}}
        settings = read([word for name in given for word in flag_words(name, given[name])], {}, "box")
        rules.check(settings)
        if draft is None:
            with launch(model, **flags) as client:
                yield client
        else:
            assert (Path(model).resolve(), Path(draft).resolve()) == (ROOT / "demo" / "base", ROOT / "demo" / "draft")
            assert settings["speculative-tokens"] in (None, 4)
            yield server

    def load(name: str) -> Any:
        spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        monkeypatch.setattr(module, "launch", launching)
        return module

    return load


@pytest.mark.parametrize("path", sorted(EXAMPLES.iterdir()), ids=lambda path: path.name)
def test_examples_are_short(path: Path) -> None:
    assert path.name == "__pycache__" or len(path.read_text().splitlines()) <= 80


@pytest.mark.long
def test_lmflow_s_prompt_loop(example: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("import os\n" + "x " * 5000 + "\nimport sys\n"))
    arguments = ["--gamma", "4", "--max_new_tokens", "24", "--temperature", "0", "--ignore_eos"]
    example("speculative_inference").main([*arguments, *SMALL])
    nothing, first, refused, second, end = capsys.readouterr().out.split("Speculative Inference: ")
    assert (nothing, end) == ("", "\n")
    for text, prompt in ((first, "import os"), (second, "import sys")):
        assert text.startswith(prompt)
        report = re.search(r"\[24 tokens in (\d+) forward passes, (\d+) of (\d+) draft tokens accepted\]\n$", text)
        assert report is not None
        steps, accepted, drafted = map(int, report.groups())
        assert steps + accepted >= 24 and 0 < accepted <= drafted <= 4 * steps
    assert "[Input validation error" in refused  # only that prompt


@pytest.mark.long
def test_llm_speculative_sampling_s_four_texts(example: Any, capsys: Any) -> None:
    prompt = "def add(a, b):\n"
    example("compare").main(["--input", prompt, "-M", "24", "-s", "3", "-v", *SMALL])
    printed = capsys.readouterr().out
    titles = ("target model", "approximation model", "DeepMind's speculative sampling", "Google's speculative decoding")
    parts = re.split("|".join(re.escape(f"\x1b[31m{title}\x1b[0m\n") for title in titles), printed)[1:]
    texts = [PAINT.sub("", re.sub(r"\n\d+ tokens in .*", "", part, flags=re.DOTALL)) for part in parts]
    assert all(text.startswith(prompt) for text in texts)
    assert texts[0] == texts[2] == texts[3] != texts[1]
    for part in parts[2:]:
        counts = COUNTS.search(part)
        assert counts is not None, part
        num_tokens, steps, accepted = map(int, counts.groups()[:3])
        brought = {name: int(number) for name, number in re.findall(r"(\w+) (\d+)", counts[4])}
        assert brought["draft"] == accepted > 0
        assert num_tokens == 1 + sum(brought.values())  # N = A + B + R, and the one behind the prompt
        assert steps == num_tokens - accepted
        assert part.count("\x1b[31m") >= accepted  # in red, as there


@pytest.mark.long
def test_xinference_s_arguments(example: Any, capsys: Any) -> None:
    launching = example("launch_speculative")
    launching.main(SMALL)
    printed = capsys.readouterr().out
    rates = re.findall(r"In total, (\d+)/(\d+) draft tokens are accepted, acceptance rate: (0\.\d\d|1\.00)\n", printed)
    assert len(rates) == 2
    for accepted, drafted, rate in rates:
        assert f"{int(accepted) / int(drafted):.2f}" == rate
    assert len(re.findall(r"draft: \d\.\d+ s, verify: \d\.\d+ s, accept: \d\.\d+ s\n", printed)) == 2
    named = [launching._id(*pair) for pair in (("Qwen/Qwen2.5", 7.0), ("Qwen/Qwen2.5-0.5B", 0.5), ("a/b", None))]
    assert named == ["Qwen/Qwen2.5-7B", "Qwen/Qwen2.5-0.5B", "a/b"]


@pytest.mark.long
def test_the_command_line_client_colours_tokens_by_source(server: Client, capsys: Any) -> None:
    asked = ["def add(a, b):\n", "-M", "24", "--speculative-method", "draft", "-v", "--color", "always"]
    assert generate.main(["--url", server.url, *asked]) == 0
    printed = capsys.readouterr()
    counts = COUNTS.search(printed.err)
    assert counts is not None, printed.err
    assert printed.out.count(generate.COLOURS["draft"]) == int(counts[3]) > 0
    assert PAINT.sub("", printed.out) == server.generate(asked[0], max_new_tokens=24, speculative_tokens=0).text + "\n"


@pytest.mark.long
def test_autogluon_rag_s_first_fragment(server: Client) -> None:
    info = server.info()
    assert (info["model_id"], info["draft_model_id"], info["speculate"]) == ("base", "draft", 4)
    # Clients of OpenAI's routes get speculation without asking.
    usage = server.chat("Write a function: Return the sum.", max_tokens=24, temperature=0)["usage"]
    assert usage["completion_tokens_details"]["accepted_prediction_tokens"] > 0


def test_autogluon_rag_s_second_fragment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    text = (EXAMPLES / "rag.yaml").read_text()
    above, first, second = re.split(r"(?=# In Transformers' terms)|# In vLLM's terms.*\n#\n", text)
    assert "assistant_model" in first
    file = tmp_path / "rag.yaml"
    file.write_text(above + second.replace("# ", "", 1).replace("\n# ", "\n"))
    assert main(["--print-config", "--config", str(file)]) == 0
    printed = capsys.readouterr().out
    assert '"speculative-tokens": 5' in printed and '"draft-model-id": "demo/draft"' in printed
