"""Prompt lookup and Medusa heads in the whole server: texts are the same without them, and drafts are accepted."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lorikeet.adapters.formats import heads as files
from lorikeet.adapters.formats.heads import HeadsFile, MedusaShape
from lorikeet.launcher import Client, launch
from lorikeet.launcher.cli.client import Answer, ServerError
from tests.e2e.launched import ROOT

DEMO = ROOT / "demo"
PROMPTS = (
    "def add(a, b):\n    return a + b\n\ndef add(a, b, c):\n",
    "class A:\n    def __init__(self, name):\n        self.name = name\n\n    def name(self):\n",
    "import os\nimport sys\n\n\ndef main():\n",
    "The river Mugge flows through the town of",
)
ASKED: tuple[dict[str, Any], ...] = (
    {},
    {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "seed": 5},
    {"repetition_penalty": 1.2, "frequency_penalty": 0.3},
)
LOOKUP_ASKED: tuple[dict[str, Any], ...] = (
    *ASKED,
    {"do_sample": True, "seed": 9, "watermark": True, "top_k": 40},
    {"stop": ["\n\n"]},
    {"do_sample": True, "seed": 3, "min_tokens": 20, "bad_words": ["self", "return", "range(1"], "stop": ["\n"]},
)
REPEATING = (
    PROMPTS[0],
    "class A:\n    def __init__(self, name):\n        self.name = name\n\nclass B:\n    def __init__(self, name):\n",
    "for i in range(10):\n    print(i)\nfor j in range(10):\n",
    "import os\n\n",
)
CITATION = {"adapter_id": "adapters/citation"}


def heads_like(num_heads: int, version: int = 2) -> HeadsFile:
    """`num_heads` copies of the demo model's heads, as files of either version."""
    found = files.read(DEMO / "heads" / "base", lambda _: None)
    tensors = dict[str, torch.Tensor]()
    for head in range(num_heads):
        for part in ("weight", "bias"):
            tensors[f"{head}.0.linear.{part}"] = found.tensors[f"{head % 3}.0.linear.{part}"].clone()
    if version == 2:
        return HeadsFile(MedusaShape(num_heads, 1, found.shape.hidden_size), tensors)
    matrix = load_file(DEMO / "base" / "model.safetensors")["model.embed_tokens.weight"]  # the output head's too
    tensors |= {f"{head}.1.weight": matrix.clone() for head in range(num_heads)}
    return HeadsFile(MedusaShape(num_heads, 1, found.shape.hidden_size, matrix.shape[0]), tensors)


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with one head, five heads, heads of version 1, and heads of another base."""
    folder = tmp_path_factory.mktemp("own")
    files.write(folder / "one", heads_like(1))
    files.write(folder / "five", heads_like(5))
    files.write(folder / "version-1", heads_like(3, version=1))
    narrow = {name: torch.zeros(size) for name, size in files.expected_shapes(MedusaShape(1, 1, 32)).items()}
    files.write(folder / "narrow", HeadsFile(MedusaShape(1, 1, 32), narrow))
    return folder


@pytest.fixture(scope="module")
def server(own: Path) -> Iterator[Client]:
    flags = {"cpu_memory": "256MiB", "threads": 1, "dtype": "float32", "default_adapter_source": "local"}
    with launch(str(DEMO / "base"), local_adapter_root=[str(DEMO), str(own)], **flags) as client:
        yield client


def ask(server: Client, prompt: str, **parameters: Any) -> Answer:
    usual = {"max_new_tokens": 32, "ignore_eos_token": True, "speculative_schedule": "constant"}
    return server.generate(prompt, **{**usual, **parameters})


def counts(answer: Answer) -> dict[str, int]:
    """The statistics that do not depend on time."""
    report = answer.details["speculation"]
    return {name: report[name] for name in ("steps", "drafted", "accepted", "resampled", "bonus")}


@pytest.mark.long
def test_texts_are_the_same_with_and_without_prompt_lookup(server: Client) -> None:
    cases = [(prompt, asked) for prompt in REPEATING[:2] for asked in LOOKUP_ASKED]
    widths = [{"speculative_tokens": width} for width in (0, 5, 10)]
    usual = {"max_new_tokens": 48, "ignore_eos_token": False}
    with ThreadPoolExecutor(8) as pool:  # batched as they arrive
        found = [
            [pool.submit(ask, server, prompt, **usual, **asked, **width) for width in widths] for prompt, asked in cases
        ]
        answers = [[each.result() for each in row] for row in found]
    accepted = 0
    for plain, *drafted in answers:
        assert "speculation" not in plain.details
        for each in drafted:
            assert each.text == plain.text
            assert [token.id for token in each.tokens] == [token.id for token in plain.tokens]
            report = each.details["speculation"]
            num_tokens = each.details["generated_tokens"]
            assert sum(report["sources"].values()) == num_tokens
            assert report["steps"] + each.details["skipped_tokens"] == num_tokens
            assert report["accepted"] <= report["drafted"]
            accepted += report["accepted"]
    assert accepted > 100


@pytest.mark.long
def test_texts_are_the_same_as_without_heads(server: Client) -> None:
    heads = ["heads/base", "one", "five", "version-1"]
    kinds: list[dict[str, Any]] = [{"adapter_id": name, "speculative_method": "medusa"} for name in heads]
    kinds += [{"adapter_id": "heads/base"}, {"heads_id": "five"}, {"adapter_id": "five", "speculative_tokens": 2}]
    of_lora: list[dict[str, Any]] = [
        {"adapter_id": "heads/citation-joined"},
        {**CITATION, "heads_id": "heads/citation"},
        {**CITATION, "heads_id": "one", "speculative_method": "medusa"},
    ]
    cases = [(prompt, asked) for prompt in PROMPTS[:2] for asked in ASKED]
    accepted = 0
    with ThreadPoolExecutor(24) as pool:  # batched as they arrive
        for plain, those in (({}, kinds), (CITATION, of_lora)):
            found = [
                [pool.submit(ask, server, prompt, **asked, **kind) for kind in (plain, *those)]
                for prompt, asked in cases
            ]
            for row in found:
                bare, *answers = [each.result() for each in row]
                assert "speculation" not in bare.details
                for answer, kind in zip(answers, those, strict=True):
                    assert [token.id for token in answer.tokens] == [token.id for token in bare.tokens], kind
                    report = answer.details["speculation"]
                    assert sum(report["sources"].values()) == 32 and report["drafted"] > 0
                    assert "draft" not in report["sources"]
                    assert "lookup" not in report["sources"] or kind.get("speculative_method") != "medusa"
                    accepted += report["sources"].get("medusa", 0)
    assert accepted > 100


@pytest.mark.long
def test_the_number_of_draft_tokens_is_limited_by_heads_and_request(server: Client) -> None:
    kinds = {name: {"adapter_id": name, "speculative_method": "medusa"} for name in ("one", "five")}
    found = {name: ask(server, PROMPTS[0], **kind).details["speculation"] for name, kind in kinds.items()}
    assert found["one"]["drafted"] <= found["one"]["steps"] < found["five"]["drafted"]
    narrow = ask(server, PROMPTS[0], **kinds["five"], speculative_tokens=1).details["speculation"]
    assert narrow["drafted"] <= narrow["steps"]
    assert "speculation" not in ask(server, PROMPTS[0], **kinds["five"], speculative_tokens=0).details


@pytest.mark.long
def test_a_joint_repository_equals_its_two_parts(server: Client) -> None:
    joined = ask(server, PROMPTS[3], adapter_id="heads/citation-joined")
    halves = ask(server, PROMPTS[3], **CITATION, heads_id="heads/citation")
    assert joined.text == halves.text != ask(server, PROMPTS[3]).text
    assert counts(joined) == counts(halves)


@pytest.mark.long
def test_version_1_with_the_base_s_matrix_equals_version_2(server: Client) -> None:
    for prompt in PROMPTS:
        two, one = (ask(server, prompt, adapter_id=name) for name in ("heads/base", "version-1"))
        assert counts(two) == counts(one) and two.text == one.text
        assert counts(two)["drafted"] > 0


@pytest.mark.long
def test_heads_of_another_base_are_an_error_that_names_them(server: Client) -> None:
    for parameters in ({"adapter_id": "narrow"}, {"heads_id": "narrow"}):
        with pytest.raises(ServerError, match="made for another base") as refused:
            ask(server, PROMPTS[0], **parameters)
        assert refused.value.status == 422


@pytest.mark.long
def test_a_repeated_request_takes_drafts_from_its_tenant_s_history(server: Client) -> None:
    for asked in ASKED[:2]:
        plain = ask(server, PROMPTS[2], **asked)
        wanted: dict[str, Any] = {**asked, "speculative_tokens": 6, "speculative_history": True}
        answers = [ask(server, PROMPTS[2], **wanted, cache_salt=salt) for salt in ("one", "one", "two")]
        assert {answer.text for answer in answers} == {plain.text}
        accepted = [answer.details["speculation"]["sources"].get("history", 0) for answer in answers]
        assert accepted[1] > 10 and accepted[0] == accepted[2]


@pytest.mark.long
def test_default_heads_apply_to_requests_without_heads(own: Path) -> None:
    """`--adapter-id` with heads only: also with a LoRA, but not for a request with other heads."""
    flags = {"cpu_memory": "128MiB", "threads": 1, "default_adapter_source": "local", "adapter_source": "local"}
    flags["dtype"] = "float32"
    roots = [str(DEMO), str(own)]
    with launch(str(DEMO / "base"), adapter_id="five", local_adapter_root=roots, **flags) as client:
        medusa = {"speculative_method": "medusa"}
        found = [ask(client, PROMPTS[0], **medusa, **more) for more in ({}, CITATION, {"adapter_id": "one"})]
        reports = [answer.details["speculation"] for answer in found]
        assert all(report["drafted"] > 2 * report["steps"] for report in reports[:2])
        assert 0 < reports[2]["drafted"] <= reports[2]["steps"]
        texts = [ask(client, PROMPTS[0], speculative_tokens=0, **more).text for more in ({}, CITATION)]
        assert [answer.text for answer in found[:2]] == texts and texts[0] != texts[1]
