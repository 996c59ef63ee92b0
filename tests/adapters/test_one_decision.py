"""`lorikeet-adapters check` and the loader give the same decision and the same reason, on 200 adapters."""

import asyncio
import json
import random
import shutil
import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file

from lorikeet.adapters import check
from lorikeet.adapters.errors import AdapterError
from lorikeet.adapters.loader import worker
from lorikeet.adapters.loader.config import LoaderConfig
from lorikeet.adapters.loader.worker import WorkerContext, WorkerJobs
from lorikeet.adapters.refs import Ref, SourceKind
from lorikeet.adapters.sources.listed import LocalSource
from tests import tiny
from tests.adapters import making
from tests.adapters.hostile import CASES, CONFIG, WEIGHTS

NUM_ADAPTERS = 200
SOUND: dict[str, dict[str, Any]] = {
    "attention": {"target_modules": ["q_proj", "v_proj"]},
    "all-linear": {"target_modules": "all-linear"},
    "pattern": {"target_modules": r".*\.1\..*(q_proj|up_proj)", "rank_pattern": {"q_proj": 3}},
    "head": {"target_modules": ["lm_head", "q_proj"]},
    "embedding": {"target_modules": ["embed_tokens"]},
    "both": {"target_modules": ["embed_tokens", "lm_head"]},
    "tied": {"target_modules": ["embed_tokens", "lm_head"], "ensure_weight_tying": True},
    "saved-head": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "saved-norm": {"target_modules": ["q_proj"], "modules_to_save": ["norm"]},
    "biases": {"target_modules": ["q_proj"], "lora_bias": True},
    "dora": {"target_modules": ["q_proj"], "use_dora": True},
    "rslora": {"target_modules": ["q_proj"], "use_rslora": True},
    "activated": {"target_modules": ["q_proj"], "alora_invocation_tokens": [5, 6]},
}
CHANGES: list[dict[str, Any]] = [
    {"note": "of a trainer"}, {"use_quantum": True, "peft_version": "99.0"}, {"r": 16}, {"r": None}, {"use_dora": True},
    {"modules_to_save": ["lm_head"]}, {"bias": "all"}, {"target_modules": ["k_proj"]}, {"task_type": "SEQ_CLS"},
    {"init_lora_weights": "lora_ga"}, {"kasa_config": {}}, {"lora_alpha": 1e30}, {"exclude_modules": ["q_proj"]},
    {"alora_invocation_tokens": [1]}, {"layers_to_transform": [1]}, {"lora_dropout": None}, {"use_rslora": True},
]  # fmt: skip


def unchanged(base: Path, adapter: Path) -> None:
    """Give its whole modules the base's values."""
    own = load_file(base / "model.safetensors")
    tensors = load_file(adapter / WEIGHTS)
    for key in tensors:
        name = key.removeprefix("base_model.model.").replace(".base_layer.", ".")
        name = "model.embed_tokens.weight" if name == "lm_head.weight" else name
        if name in own:
            tensors[key] = own[name].clone()
    save_file(tensors, adapter / WEIGHTS)


def make(base: Path, root: Path) -> list[str]:
    """The adapters below `root`, by name."""
    for number, (name, settings) in enumerate(SOUND.items()):
        config = LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", **settings)
        adapter = making.make_adapter(base, root / name, config, seed=number)
        if "modules_to_save" in settings:
            unchanged(base, shutil.copytree(adapter, root / f"{name}-unchanged"))
        rounded = shutil.copytree(adapter, root / f"{name}-bfloat16")
        tensors = load_file(rounded / WEIGHTS)
        save_file({key: tensor.bfloat16() for key, tensor in tensors.items()}, rounded / WEIGHTS)
        pickled = shutil.copytree(adapter, root / f"{name}-pickled")
        (pickled / WEIGHTS).unlink()
        torch.save(tensors, pickled / "adapter_model.bin")
    for number, (change, _, _) in enumerate(CASES.values()):
        change(shutil.copytree(root / "attention", root / f"case-{number}"))
    generator = random.Random(7)
    names = sorted(path.name for path in root.iterdir())
    for number in range(NUM_ADAPTERS - len(names)):
        adapter = shutil.copytree(root / generator.choice(list(SOUND)), root / f"changed-{number}")
        values = json.loads((adapter / CONFIG).read_text())
        for change in generator.sample(CHANGES, generator.choice((1, 1, 2))):
            values |= change
        (adapter / CONFIG).write_text(json.dumps(values))
    return sorted(path.name for path in root.iterdir())


def of_loader(base: Path, root: Path, folder: Path, names: list[str]) -> dict[str, str]:
    """Why the loader rejects each adapter, by name; "" for one that it stores."""
    config = LoaderConfig(socket="", model_path=str(base), adapter_store=str(folder / "store"))
    jobs, source = WorkerJobs(WorkerContext(config)), LocalSource([root], making.LIMIT)
    reasons = {}
    for name in names:
        work = folder / "work" / name
        work.mkdir(parents=True)
        try:
            pin = asyncio.run(source.resolve(Ref(SourceKind.LOCAL, name), None)).pin
            fetched = source.fetch(pin, None, work)
        except AdapterError as error:
            reasons[name] = str(error)
            continue
        answer = worker._done(jobs.convert, {"folder": str(fetched), "name": name})
        reason = answer["error"]["message"] if "error" in answer else ""
        reasons[name] = reason.removeprefix(f"the adapter {name} cannot be served: ")
    return reasons


def of_check(
    base: Path, root: Path, folder: Path, names: list[str], capsys: pytest.CaptureFixture[str], *options: str
) -> dict[str, tuple[str, str]]:
    """State and reason of each adapter."""
    file = folder / "catalogue.yaml"
    file.write_text(json.dumps({name: {"source": "local", "id": name} for name in names}))
    arguments = ["check", str(file), "--model-id", str(base), "--local-adapter-root", str(root), "--json", *options]
    capsys.readouterr()
    assert check.main(arguments) == 1
    rows = map(json.loads, capsys.readouterr().out.splitlines())
    return {row["alias"]: (row["state"], row["reason"]) for row in rows}


MEMORY = "reading it needs more memory than its size explains"
"""What the loader says of a file that claims too much. The check has no such limit, and reads on."""


def has_same_reason(of_check: str, of_loader: str) -> bool:
    """Without the words of torch, which depend on the memory that the process may have."""
    if of_loader == MEMORY:
        return " cannot be read: " in of_check or of_check == MEMORY
    return of_check.partition(" cannot be read: ")[0] == of_loader.partition(" cannot be read: ")[0]


def test_the_check_decides_as_the_loader_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    warnings.filterwarnings("ignore", category=peft.utils.warning.PeftWarning)
    base = tiny.make("llama", tmp_path / "base", tokenizer=True, tie_word_embeddings=True)
    root = tmp_path / "root"
    names = make(base, root)
    assert len(names) == NUM_ADAPTERS
    reasons = of_loader(base, root, tmp_path, names)
    num_served = sum(reason == "" for reason in reasons.values())
    assert num_served > 40, "adapters that are all rejected prove little"
    by_all_bytes = of_check(base, root, tmp_path, names, capsys, "--read-weights")
    for name, (state, reason) in by_all_bytes.items():
        assert state == ("refused" if reasons[name] else "served"), (name, reason, reasons[name])
        assert state == "served" or has_same_reason(reason, reasons[name]), (name, reason, reasons[name])
    for name, (state, reason) in of_check(base, root, tmp_path, names, capsys).items():
        if state == "refused":
            assert has_same_reason(reason, reasons[name]), (name, reason, reasons[name])
        elif state == "unseen":
            assert (root / name / "adapter_model.bin").exists(), (name, reason)
        else:
            assert reasons[name] == "" or "not finite" in reasons[name] or "too large" in reasons[name], name
