"""Adapters with tokens of their own in the whole server, compared with PEFT and the adapter's tokenizer."""

import json
import re
import urllib.error
import urllib.request
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests import tiny
from tests.adapters.making import make_adapter
from tests.e2e.launched import Launched

SIZE, EXTRA, NUM_TOKENS = 320, 4, 16
PROMPTS = ("a <note> b", "the quick <|done|> brown fox", "def main() -> None:")
TARGETS = ["q_proj", "v_proj", "down_proj"]
TEMPLATE = "{% for message in messages %}<note>{{ message.content }}{% endfor %}"


def enlarged(base: Path, num_added: int) -> Any:
    """The base with so many more tokens, whose rows differ from those of no adapter."""
    network: Any = AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager", dtype=torch.float32).eval()
    torch.manual_seed(0)
    network.resize_token_embeddings(SIZE + num_added)
    with torch.no_grad():
        for end in (network.get_input_embeddings(), network.get_output_embeddings()):
            end.weight[SIZE:].normal_(std=1.7 * float(end.weight[:SIZE].std()))
    return network


def make(base: Path, folder: Path, tokens: list[str], special: list[str], seed: int) -> Path:
    """An adapter with these tokens, its tokenizer and its chat template."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.add_tokens(tokens)
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    tokenizer.chat_template = TEMPLATE
    num_added = len(tokens) + len(special)
    config = peft.LoraConfig(
        task_type="CAUSAL_LM", r=4, target_modules=TARGETS, trainable_token_indices=[*range(SIZE, SIZE + num_added)]
    )
    model = peft.get_peft_model(enlarged(base, num_added), config)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@dataclass
class Scene:
    """A running server over one tiny model and its adapters."""

    launched: Launched
    base: Path
    roots: Path

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(self.launched.url + path, json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=120) as response:
                return response.status, json.loads(response.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    def expected(self, name: str, prompt: str) -> tuple[list[int], str]:
        """PEFT's tokens, and their text by the adapter's tokenizer. A special token ends a character."""
        tokenizer = AutoTokenizer.from_pretrained(self.base if name == "plain" else self.roots / name)
        network = enlarged(self.base, len(tokenizer) - SIZE)
        model: Any = peft.PeftModel.from_pretrained(network, self.roots / name).eval()
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        with torch.no_grad():
            whole = model.generate(input_ids=ids, do_sample=False, max_new_tokens=NUM_TOKENS, eos_token_id=None)
        output = whole[0, ids.shape[1] :].tolist()
        runs = ([*run] for is_special, run in groupby(output, tokenizer.all_special_ids.__contains__) if not is_special)
        return output, "".join(map(tokenizer.decode, runs))


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    warnings.simplefilter("ignore")  # PEFT's own, about merging
    folder = tmp_path_factory.mktemp("added")
    base = tiny.make("llama", folder / "base", tokenizer=True)
    roots = folder / "roots"
    make(base, roots / "notes", ["<note>"], ["<|done|>"], seed=1)
    make(base, roots / "others", ["quick brown", "<other>", "<note>"], [], seed=2)
    make(base, roots / "many", [f"<{number}>" for number in range(EXTRA + 1)], [], seed=3)
    make_adapter(base, roots / "plain", peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=TARGETS), seed=4)
    arguments = ["--model-id", str(base), "--dtype", "float32", "--threads", "1", "--adapter-source", "local"]
    arguments += ["--local-adapter-root", str(roots), "--adapter-store", str(folder / "store")]
    arguments += ["--draft-model-id", str(base)]  # it has none of the added tokens
    with Launched(*arguments, "--adapter-extra-vocab-size", str(EXTRA)) as launched:
        launched.wait_until_ready()
        yield Scene(launched, base, roots)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("method", ["lookup", "draft"])
def test_tokens_and_texts_of_a_batch_are_peft_s(method: str, scene: Scene) -> None:
    wanted = [(name, prompt) for name in ("notes", "others", "plain") for prompt in PROMPTS]
    expected = [scene.expected(name, prompt) for name, prompt in wanted]
    assert any(max(ids) >= SIZE for ids, _ in expected), "texts without added tokens prove little"

    def given(pair: tuple[str, str]) -> tuple[list[int], str]:
        parameters = {
            "max_new_tokens": NUM_TOKENS, "adapter_id": pair[0], "details": True, "ignore_eos_token": True,
            "return_full_text": False, "speculative_tokens": 4, "speculative_method": method,
        }  # fmt: skip
        status, answer = scene.post("/generate", {"inputs": pair[1], "parameters": parameters})
        assert status == 200, answer
        return [token["id"] for token in answer["details"]["tokens"]], answer["generated_text"]

    with ThreadPoolExecutor(len(wanted)) as pool:
        assert list(pool.map(given, wanted)) == expected


@pytest.mark.filterwarnings("ignore")
def test_the_chat_template_of_the_adapter_writes_its_tokens(scene: Scene) -> None:
    body = {"model": "notes", "messages": [{"role": "user", "content": "b"}], "max_tokens": NUM_TOKENS}
    status, answer = scene.post("/v1/chat/completions", {**body, "ignore_eos": True, "temperature": 0})
    assert status == 200, answer
    _, text = scene.expected("notes", "<note>b")
    assert answer["choices"][0]["message"]["content"] == text


def test_ids_are_those_of_the_adapter(scene: Scene) -> None:
    for name, last in (("notes", SIZE + 1), ("others", SIZE + 2), ("plain", SIZE - 1)):
        for given, status in ((last, 200), (last + 1, 400)):
            code, answer = scene.post("/v1/completions", {"model": name, "prompt": [5, given], "max_tokens": 1})
            assert code == status, answer
            assert status == 200 or f"not below {last + 1}" in answer["error"]["message"]


def test_what_is_not_served_is_rejected(scene: Scene) -> None:
    status, answer = scene.post("/v1/completions", {"model": "many", "prompt": "a", "max_tokens": 1})
    assert status == 422 and "--adapter-extra-vocab-size 5 or more" in answer["error"]["message"]
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}
    for field, value in (("logprobs", 1), ("response_format", schema), ("receipt", True)):
        body = {"model": "notes", "prompt": "a", "max_tokens": 1, "temperature": 0, field: value}
        status, answer = scene.post("/v1/completions", body)
        assert status == 422 and re.match(rf"`{field}\b.*` is not available", answer["error"]["message"]), answer
        assert scene.post("/v1/completions", body | {"model": "plain"})[0] == 200
