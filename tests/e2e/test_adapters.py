"""Adapters in the whole server: launcher, loader, router and shard as real processes, compared with PEFT."""

import json
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lorikeet.adapters.formats import heads as files
from lorikeet.adapters.formats.heads import MedusaShape
from tests import tiny
from tests.adapters import kinds
from tests.adapters.making import make_adapter
from tests.adapters.medusa import small
from tests.e2e.launched import Launched

PROMPTS = ("the quick brown fox", "def main() -> None:", "a parrot repeats what")
NUM_TOKENS = 12
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CONFIGS = {
    "small": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
    "wide": {"r": 16, "lora_alpha": 16, "target_modules": LINEARS, "use_rslora": True},
    "head": {"r": 8, "lora_alpha": 16, "target_modules": ["lm_head", "o_proj"]},
}
SIXTEEN = (
    "PROMPT_TUNING", "PREFIX_TUNING", "CPT", "P_TUNING", "DoRA", "ADALORA", "MISS", "VERA", "LN_TUNING", "IA3", "OFT",
    "LOHA", "BEFT", "RANDLORA", "TRAINABLE_TOKENS", "TINYLORA",
)  # fmt: skip


@dataclass
class Scene:
    """A running server over one tiny model and its adapters."""

    launched: Launched
    base: Path
    roots: Path

    def post(self, path: str, body: dict[str, Any], token: str | None = None) -> tuple[int, dict[str, str], Any]:
        headers = {"content-type": "application/json"}
        if token is not None:
            headers["authorization"] = f"Bearer {token}"
        request = urllib.request.Request(self.launched.url + path, json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=120) as response:
                return response.status, dict(response.headers), json.loads(response.read() or b"null")
        except urllib.error.HTTPError as error:
            return error.code, dict(error.headers), json.loads(error.read() or b"null")

    def ids(self, prompt: str, adapter: str | None, **parameters: Any) -> list[int]:
        """The greedy tokens that the server gives."""
        wanted = {"max_new_tokens": NUM_TOKENS, "adapter_id": adapter, "details": True, **parameters}
        status, _, answer = self.post("/generate", {"inputs": prompt, "parameters": wanted})
        assert status == 200, answer
        return [token["id"] for token in answer["details"]["tokens"]]


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("adapters")
    base = tiny.make("llama", folder / "base", tokenizer=True)
    roots = folder / "roots"
    for seed, (name, config) in enumerate(CONFIGS.items()):
        make_adapter(base, roots / name, peft.LoraConfig(task_type="CAUSAL_LM", **config), seed=seed)
    for name in ("PROMPT_TUNING", "PREFIX_TUNING"):
        kinds.make(name, base, roots / name)
    arguments = ["--model-id", str(base), "--dtype", "float32", "--threads", "1", "--adapter-source", "local"]
    arguments += ["--local-adapter-root", str(roots), "--adapter-store", str(folder / "store")]
    with Launched(*arguments) as launched:
        launched.wait_until_ready()
        yield Scene(launched, base, roots)


def oracle(scene: Scene, prompt: str, name: str | None, merged: dict[str, Any] | None = None) -> list[int]:
    """PEFT's tokens for the prompt; `merged`: with further adapters, as in a request."""
    tokenizer = AutoTokenizer.from_pretrained(scene.base)
    model: Any = AutoModelForCausalLM.from_pretrained(scene.base, attn_implementation="eager", dtype=torch.float32)
    if name is not None:
        model = peft.PeftModel.from_pretrained(model, scene.roots / name, name)
    if merged is not None:
        for other in merged["ids"][1:]:
            model.load_adapter(scene.roots / other, other)
        model.add_weighted_adapter(merged["ids"], merged["weights"], "sum", combination_type=merged["merge_strategy"])
        model.set_adapter("sum")
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    with torch.no_grad():
        whole = model.eval().generate(input_ids=ids, do_sample=False, max_new_tokens=NUM_TOKENS, eos_token_id=None)
    return [int(token) for token in whole[0, ids.shape[1] :]]


@pytest.mark.filterwarnings("ignore:Position ids are not supported")  # PEFT's own, of virtual tokens
def test_tokens_in_a_batch_equal_peft_s(scene: Scene) -> None:
    wanted = [(prompt, name) for prompt in PROMPTS for name in (None, *CONFIGS, "PROMPT_TUNING", "PREFIX_TUNING")]
    with ThreadPoolExecutor(len(wanted)) as pool:
        given = list(pool.map(lambda pair: scene.ids(*pair, ignore_eos_token=True), wanted))
    expected = [oracle(scene, *pair) for pair in wanted]
    assert given == expected
    plain = {prompt: ids for (prompt, name), ids in zip(wanted, expected, strict=True) if name is None}
    changed = [ids != plain[prompt] for (prompt, name), ids in zip(wanted, expected, strict=True) if name]
    assert sum(changed) >= 0.9 * len(changed)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # PEFT's own, of several types
def test_sixteen_kinds_at_once_with_drafts_equal_peft_s(scene: Scene) -> None:
    for name in SIXTEEN:
        if not (scene.roots / name).exists():
            kinds.make(name, scene.base, scene.roots / name)
    files.write(scene.roots / "heads", small.heads(MedusaShape(3, 1, 64), scale=0.01))
    wanted = [(PROMPTS[index % len(PROMPTS)], name) for index, name in enumerate((*SIXTEEN, None))]
    ways = [{"speculative_method": "lookup"}, {"speculative_method": "medusa", "heads_id": "heads"}]

    def ids(index: int) -> list[int]:
        drafts = {**ways[index % 2], "speculative_schedule": "constant"}
        return scene.ids(*wanted[index], ignore_eos_token=True, **drafts)

    with ThreadPoolExecutor(len(wanted)) as pool:
        given = list(pool.map(ids, range(len(wanted))))
    assert given == [oracle(scene, *pair) for pair in wanted]
    plain = {prompt: oracle(scene, prompt, None) for prompt in PROMPTS}
    changed = [ids != plain[prompt] for (prompt, name), ids in zip(wanted, given, strict=True) if name]
    assert sum(changed) >= 0.75 * len(changed)


def test_the_answer_names_its_adapter(scene: Scene) -> None:
    _, headers, _ = scene.post("/generate", {"inputs": "x", "parameters": {"adapter_id": "wide", "max_new_tokens": 1}})
    assert (headers["x-adapter-id"], headers["x-adapter-source"]) == ("wide", "local")
    assert len(headers["x-adapter-digest"]) == len(headers["x-adapter-revision"]) == 64


def test_an_invalid_adapter_fails_only_its_request(scene: Scene) -> None:
    broken = scene.roots / "broken"
    broken.mkdir()
    (broken / "adapter_config.json").write_text("{}")
    (broken / "adapter_model.safetensors").write_bytes(b"\xff" * 64)
    before = scene.ids(PROMPTS[0], "small", ignore_eos_token=True)
    for name, status in (("broken", 422), ("absent", 404), ("../base", 404)):
        code, _, answer = scene.post("/generate", {"inputs": "x", "parameters": {"adapter_id": name}})
        assert (code, answer["error_type"]) == (status, "generation"), answer
        code, _, answer = scene.post("/v1/completions", {"model": name, "prompt": "x"})
        assert code == status and set(answer["error"]) == {"message", "type", "param", "code"}
    assert scene.ids(PROMPTS[0], "small", ignore_eos_token=True) == before


def test_merged_adapters(scene: Scene) -> None:
    given = []
    for strategy, ids, weights in (("cat", ["small", "head"], [1.5, 0.5]), ("cat", ["small", "head"], [-1.0, 1.0]),
                                   ("linear", ["small"], [2.0])):  # fmt: skip
        merged = {"ids": ids, "weights": weights, "merge_strategy": strategy}
        given.append(scene.ids(PROMPTS[0], None, merged_adapters=merged, ignore_eos_token=True))
        assert given[-1] == oracle(scene, PROMPTS[0], ids[0], merged)
    lora = [{"id": "small", "scale": 1.5}, {"id": "head", "scale": 0.5}]
    assert scene.ids(PROMPTS[0], None, lora=lora, ignore_eos_token=True) == given[0]
    assert len({tuple(ids) for ids in given}) == len(given)


@pytest.mark.long
def test_sighup_reloads_a_catalogue_over_two_shards(scene: Scene, tmp_path: Path) -> None:
    path = tmp_path / "catalogue.yaml"
    path.write_text("support: {id: small, pin: true}\nbroken: {id: nowhere}\n")
    arguments = ["--model-id", str(scene.base), "--dtype", "float32", "--adapter-source", "local"]
    arguments += ["--local-adapter-root", str(scene.roots), "--adapter-store", str(scene.roots.parent / "store")]
    arguments += ["--replicas", "2", "--adapters", str(path), "--cpu-memory", "256MiB"]
    with Launched(*arguments, ADMIN_KEY="secret") as launched:
        launched.wait_for("is ready at")
        other = Scene(launched, scene.base, scene.roots)
        models = json.loads(urllib.request.urlopen(f"{launched.url}/v1/models").read())["data"]
        assert {model["id"]: bool(model.get("problem")) for model in models[1:]} == {"support": False, "broken": True}
        expected = {name: oracle(scene, PROMPTS[0], name) for name in (None, *CONFIGS)}
        assert other.ids(PROMPTS[0], "support", ignore_eos_token=True) == expected["small"]
        with ThreadPoolExecutor(8) as pool:
            names = [None, *CONFIGS] * 6
            given = list(pool.map(lambda name: other.ids(PROMPTS[0], name, ignore_eos_token=True), names))
        assert given == [expected[name] for name in names]
        path.write_text("support: {id: wide}\n")
        launched.signal(signal.SIGHUP)
        launched.wait_for("catalogue_reloaded")
        assert other.ids(PROMPTS[0], "support", ignore_eos_token=True) == expected["wide"]
        path.write_text("support: [")
        launched.signal(signal.SIGHUP)
        launched.wait_for("catalogue_not_reloaded")
        assert other.ids(PROMPTS[0], "support", ignore_eos_token=True) == expected["wide"]
        status, _, answer = other.post("/admin/adapters/unload", {"adapter_id": "wide"}, token="secret")
        assert status == 200 and len(answer["unloaded"]) == 1
        assert other.ids(PROMPTS[0], "wide", ignore_eos_token=True) == expected["wide"]
        launched.signal(signal.SIGTERM)
        assert launched.wait() == 0


@pytest.mark.long
@pytest.mark.parametrize(
    "flags",
    [
        ("--adapter-id", "nowhere"),
        ("--preloaded-adapter-ids", "nowhere", "--strict-adapters"),
    ],
)
def test_a_missing_default_or_strict_adapter_ends_the_start(scene: Scene, flags: tuple[str, ...]) -> None:
    arguments = ["--model-id", str(scene.base), "--adapter-source", "local", "--threads", "1"]
    with Launched(*arguments, "--local-adapter-root", str(scene.roots), *flags) as launched:
        assert launched.wait(180) == 7
        assert "1 adapters cannot be served, first nowhere: there is no adapter" in launched.output
