"""One adapter of each family of PEFT's types on a real model, in one batch, next to PEFT."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoTokenizer

from lorikeet.proto.params import FIRST_VIRTUAL_ID
from lorikeet.shard.config import ShardConfig
from lorikeet.shard.requests.request import Request
from tests.real import likelihood, models
from tests.shard.engine.adapter_exactness import lay_out, outputs_of
from tests.shard.engine.exactness import TIE

pytestmark = [pytest.mark.real, pytest.mark.filterwarnings("ignore")]

NAME = "smollm2"
ATTENTION = ["q_proj", "v_proj"]
LAYERS: dict[str, Any] = {"layers_to_transform": [3, 17], "target_modules": ATTENTION}
NUM_VIRTUAL = 12
FAMILIES: dict[str, Callable[[], peft.PeftConfig]] = {
    "singular values": lambda: peft.AdaLoraConfig(init_r=6, total_step=10, **LAYERS),
    "shared random factors": lambda: peft.VeraConfig(r=32, **LAYERS),
    "blocks of inputs": lambda: peft.MissConfig(r=8, init_weights="mini", mini_r=4, **LAYERS),
    "products": lambda: peft.LoHaConfig(r=4, **LAYERS),
    "rotations": lambda: peft.OFTConfig(r=0, oft_block_size=16, **LAYERS),
    "scales": peft.IA3Config,
    "biases": lambda: peft.BeftConfig(target_modules=ATTENTION),
    "norms": peft.LNTuningConfig,
    "tokens": lambda: peft.TrainableTokensConfig(token_indices=[28, 253, 284, 288]),
    "embeddings before the prompt": lambda: peft.PromptTuningConfig(num_virtual_tokens=NUM_VIRTUAL),
    "keys and values before the prompt": lambda: peft.PrefixTuningConfig(num_virtual_tokens=NUM_VIRTUAL),
    "a pooled input": lambda: peft.LoraConfig(r=8, use_qalora=True, qalora_group_size=16, **LAYERS),
}
NUM_TOKENS, NUM_NEW = 32, 12
STEP = 0.05
"""Standard deviation of what training adds."""


def made(folder: Path) -> dict[str, Path]:
    """The adapters, with values as after training."""
    base = models.folder(NAME, "float32")
    for name, make in FAMILIES.items():
        torch.manual_seed(0)
        config = make()
        config.task_type = "CAUSAL_LM"
        network: Any = peft.get_peft_model(models.network(base, "float32"), config)
        with torch.no_grad():
            for parameter in network.parameters():
                if parameter.requires_grad:
                    parameter.add_(STEP * torch.randn_like(parameter))
        network.save_pretrained(folder / name)
    return {name: folder / name for name in FAMILIES}


def test_families_in_one_batch_give_what_peft_gives(tmp_path: Path) -> None:
    base, adapters = models.folder(NAME, "float32"), made(tmp_path)
    digests = {"": ""} | lay_out(base, tmp_path / "store", adapters)
    tokenizer: Any = AutoTokenizer.from_pretrained(base)
    ids = tokenizer(likelihood.TEXT.read_text()).input_ids
    prompts = {name: ids[7 * index : 7 * index + NUM_TOKENS] for index, name in enumerate(digests)}
    requests = []
    for index, (name, digest) in enumerate(digests.items()):
        virtual = range(FIRST_VIRTUAL_ID, FIRST_VIRTUAL_ID + NUM_VIRTUAL * ("before the prompt" in name))
        request = Request((1, index), [*virtual, *prompts[name]], len(virtual) + NUM_TOKENS, NUM_NEW)
        request.adapter_digest, request.num_virtual = digest, len(virtual)
        requests.append(request)
    config = ShardConfig(
        NAME, str(base), "unix:/dev/null", dtype="float32", max_total_tokens=128, num_pages=128, threads=1,
        adapter_store=str(tmp_path / "store"), max_active_adapters=len(digests), cpu_memory=2 << 30,
    )  # fmt: skip
    num_changed = 0
    for name, output in zip(digests, outputs_of(config, requests), strict=True):
        text = torch.tensor([[*prompts[name], *output.token_ids]])
        network = models.network(base, "float32")
        with torch.inference_mode():
            bare = network(text).logits[0, -NUM_NEW - 1 : -1]
            adapted = peft.PeftModel.from_pretrained(network, str(adapters[name])).eval() if name else network
            before = adapted(text).logits[0, -NUM_NEW - 1 : -1]  # after virtual tokens, if there are any
        chosen = before.gather(1, torch.tensor(output.token_ids)[:, None])[:, 0]
        assert float((before.amax(1) - chosen).max()) < TIE, name
        num_changed += bool(name) and float((before - bare).abs().max()) > 10 * TIE
    assert num_changed == len(FAMILIES)
