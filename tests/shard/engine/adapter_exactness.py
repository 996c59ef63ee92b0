"""Many adapters in one batch against PEFT, one architecture at a time, on tiny random models.

PEFT makes and saves the adapters, the loader's own code lays them out, and the oracle is `PeftModel.generate`, each
prompt alone.
"""

import signal
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import peft
import torch
from peft.tuners.lora import LoraLayer
from transformers import AutoModelForCausalLM

from lorikeet.adapters.loader.config import LoaderConfig
from lorikeet.adapters.loader.worker import WorkerContext, WorkerJobs
from lorikeet.shard.config import ShardConfig
from lorikeet.shard.grpc.streams import Commands, Inbox, Outbox, Output, StreamOpened
from lorikeet.shard.model import load_model
from lorikeet.shard.requests.request import Request
from lorikeet.shard.startup.build import build_engine
from tests import tiny
from tests.shard.engine.exactness import MIN_DISTINCT, MOST_SEEDS, NEW_TOKENS, TIE, prompts_of

ARCHITECTURES = (
    "llama", "mistral", "qwen2", "qwen3", "gemma2", "phi3", "gpt2", "bloom", "opt", "gpt_neox", "mixtral",
)  # fmt: skip
LENGTHS = (5, 17, 33, 2, 12, 24, 40, 9, 3, 21, 14, 28)
FEW_SLOTS = 3
"""Fewer than adapters, so that they are evicted and loaded in between."""

LLAMA = (["q_proj", "k_proj", "v_proj", "o_proj"], ["gate_proj", "up_proj", "down_proj"])
NEOX = (["query_key_value", "dense"], ["dense_h_to_4h", "dense_4h_to_h"])
TARGETS = {
    "gpt2": (["c_attn"], ["c_fc", "mlp.c_proj"]),
    "bloom": NEOX,
    "gpt_neox": NEOX,
    "opt": (["q_proj", "k_proj", "v_proj", "out_proj"], ["fc1", "fc2"]),
    "phi3": (["qkv_proj", "o_proj"], ["gate_up_proj", "down_proj"]),
    "mixtral": (["q_proj", "k_proj", "o_proj"], ["v_proj"]),  # its experts are parameters, no linear layers
}
ENDS = {
    "gpt2": ("wte", "lm_head"),
    "bloom": ("word_embeddings", "lm_head"),
    "gpt_neox": ("embed_in", "embed_out"),
}


@dataclass
class Tried:
    """What one architecture gave in one way of running."""

    name: str
    num_slots: int
    num_requests: int = 0
    num_tokens: int = 0
    num_ties: int = 0
    num_distinct: int = 0
    """Fewest distinct tokens in a text."""
    share_changed: float = 0.0
    """Share of the texts under an adapter that the bare base would not have written."""
    differences: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Text:
    """What PEFT wrote: tokens, and [tokens, V] logits."""

    token_ids: list[int]
    logits: torch.Tensor


def configs_of(name: str) -> dict[str, peft.LoraConfig]:
    """Adapters of every kind for one architecture."""
    attention, mlp = TARGETS.get(name, LLAMA)
    every = [*attention, *mlp]
    common: dict[str, Any] = {"fan_in_fan_out": True} if name == "gpt2" else {}
    layers = "h" if name in ("gpt2", "bloom") else "layers"
    made = {
        "attention": peft.LoraConfig(r=4, lora_alpha=8, target_modules=attention, **common),
        "rslora": peft.LoraConfig(r=16, lora_alpha=8, target_modules=every, use_rslora=True, **common),
        "dora": peft.LoraConfig(r=8, lora_alpha=8, target_modules=attention, use_dora=True, **common),
        "patterns": peft.LoraConfig(
            r=8, lora_alpha=16, target_modules=every, rank_pattern={mlp[0]: 3, attention[0]: 20},
            alpha_pattern={mlp[0]: 9}, **common,
        ),
        "one_layer": peft.LoraConfig(
            r=8, lora_alpha=32, target_modules=every, layers_to_transform=[1], layers_pattern=layers, **common
        ),
        "mlp": peft.LoraConfig(r=2, lora_alpha=4, target_modules=mlp, **common),
        "ends": peft.LoraConfig(
            r=5, lora_alpha=10, target_modules=[*ENDS.get(name, ("embed_tokens", "lm_head")), *attention]
        ),
        "bias": peft.LoraConfig(r=1, lora_alpha=2, target_modules=attention, lora_bias=True, **common),
    }  # fmt: skip
    if name == "mixtral":
        made["experts"] = peft.LoraConfig(
            r=4, lora_alpha=8, target_modules=attention,
            target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        )  # fmt: skip
        made["router"] = peft.LoraConfig(
            r=4, lora_alpha=8, target_modules=attention, target_parameters=["mlp.gate.weight"]
        )
    return made


def make_adapters(
    base: Path, folder: Path, configs: Mapping[str, peft.LoraConfig], seed: int, save_embedding_layers: bool = False
) -> dict[str, Path]:
    """Save each adapter, with random weights that change the text, as PEFT saves it."""
    made = {}
    for number, (name, config) in enumerate(configs.items()):
        torch.manual_seed(1000 * seed + number)
        model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base).eval(), config)
        for module in model.modules():
            if isinstance(module, LoraLayer):
                _randomise(module)
        made[name] = folder / name
        model.save_pretrained(made[name], save_embedding_layers=save_embedding_layers)
    return made


@torch.no_grad()
def _randomise(layer: Any) -> None:
    scaling = layer.scaling["default"]
    if "default" in layer.lora_A:
        a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        a.normal_(std=a.shape[1] ** -0.5)
        b.normal_(std=a.shape[0] ** -0.5 / scaling)
        if layer.lora_B["default"].bias is not None:
            layer.lora_B["default"].bias.normal_(std=0.3)
    if "default" in layer.lora_embedding_A:
        layer.lora_embedding_A["default"].normal_()
        layer.lora_embedding_B["default"].normal_(std=0.3 / scaling)
    if "default" in getattr(layer, "lora_magnitude_vector", {}):
        magnitude = layer.lora_magnitude_vector["default"].weight
        magnitude.mul_(1 + 0.3 * torch.randn_like(magnitude))


def load_plain(base: Path) -> Any:
    """transformers' own network."""
    return AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager").eval()


def oracle(
    base: Path,
    adapters: Mapping[str, Path],
    chosen: Sequence[str],
    prompts: list[list[int]],
    load: Callable[[Path], Any] = load_plain,
) -> list[Text]:
    """PEFT's own greedy text, each prompt alone under its adapter; "" is the bare base, which `load` reads."""
    texts: dict[int, Text] = {}
    for adapter in dict.fromkeys(chosen):
        model = load(base)
        if adapter:
            model = peft.PeftModel.from_pretrained(model, str(adapters[adapter])).eval()
        for index in (i for i, each in enumerate(chosen) if each == adapter):
            ids = torch.tensor([prompts[index]])
            output = model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW_TOKENS,
                return_dict_in_generate=True, output_logits=True,
            )  # fmt: skip
            logits = torch.stack(output.logits, 1)[0].float()
            texts[index] = Text(output.sequences[0, ids.shape[1] :].tolist(), logits)
    return [texts[index] for index in range(len(chosen))]


@torch.no_grad()
def not_of_base(base: Path, prompts: list[list[int]], texts: list[list[int]]) -> list[bool]:
    """Whether the bare base would write another greedy text than each of these: it chooses another token somewhere."""
    model = load_plain(base)
    changed = []
    for prompt, text in zip(prompts, texts, strict=True):
        chosen = model(torch.tensor([prompt + text[:-1]])).logits[0, len(prompt) - 1 :].argmax(-1)
        changed.append(chosen.tolist() != text)
    return changed


def lay_out(
    base: Path, store: Path, adapters: Mapping[str, Path], dtype: str = "float32", num_extra: int = 0
) -> dict[str, str]:
    """Have the loader's code bring the adapters into the served layout; their digests. `num_extra`: rows for tokens
    that they add.
    """
    config = LoaderConfig(
        socket="", model_path=str(base), adapter_store=str(store), dtype=dtype, adapter_extra_vocab_size=num_extra
    )
    jobs = WorkerJobs(WorkerContext(config))
    try:
        return {
            name: str(jobs.convert({"folder": str(folder)})["entry"]["digest"]) for name, folder in adapters.items()
        }
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)  # a reader limits the processor time that is left to its process


def through_engine(config: ShardConfig, prompts: list[list[int]], digests: list[str]) -> list[list[int]]:
    """Greedy text of all requests at once through slots, scheduler, pages and sampling."""
    requests = [
        Request((1, index), list(prompt), len(prompt), NEW_TOKENS, adapter_digest=digest)
        for index, (prompt, digest) in enumerate(zip(prompts, digests, strict=True))
    ]
    return [output.token_ids for output in outputs_of(config, requests)]


def outputs_of(config: ShardConfig, requests: Sequence[Request]) -> list[Output]:
    """What an engine gives for requests at once, each as one output. Their keys are (1, index)."""
    inbox, outbox = Inbox(), Outbox()
    engine = build_engine(config, load_model(config), inbox, outbox)
    outbox.open(1, wake=lambda: None)
    inbox.put(StreamOpened(1))
    inbox.put(Commands(1, submits=list(requests)))
    outputs: dict[int, Output] = {}
    num_ended = 0
    while num_ended < len(requests):
        engine.step()
        if not engine.scheduler.running:
            inbox.wait(0.05)
        for output in outbox.take(1).request_outputs():
            if output.error:
                raise RuntimeError(output.error)
            if output.key[1] in outputs:
                outputs[output.key[1]].merge(output)
            else:
                outputs[output.key[1]] = output
            num_ended += bool(output.finish_reason)
    engine.scheduler.check()
    return [outputs[index] for index in range(len(requests))]


def compare(tried: Tried, wanted: list[Text], given: list[list[int]], chosen: Sequence[str], tie: float = TIE) -> None:
    """Equal tokens up to ties of the oracle."""
    tried.num_requests = len(wanted)
    for index, (want, got) in enumerate(zip(wanted, given, strict=True)):
        pairs = zip(want.token_ids, got, strict=True)
        same = next((at for at, (a, b) in enumerate(pairs) if a != b), len(got))
        tried.num_tokens += same
        if same < len(got):
            best = want.logits[same].topk(2).values
            if best[0] - best[1] < tie:
                tried.num_ties += 1
            else:
                tried.differences.append(f"request {index} ({chosen[index] or 'base'}) differs at token {same}")


def check(
    name: str, folder: Path, num_slots: Sequence[int] = (16, FEW_SLOTS), device: str = "cpu", tie: float = TIE
) -> list[Tried]:
    """Make, load, run and compare one architecture, once per number of slots."""
    warnings.filterwarnings("ignore", category=peft.utils.warning.PeftWarning)  # about merging, which nobody does here
    warnings.filterwarnings("ignore", message="fan_in_fan_out is set")
    configs = configs_of(name)
    chosen = [*configs, "", "dora", "attention", ""][: max(12, len(configs) + 3)]
    prompts = prompts_of(name, (*LENGTHS, 19)[: len(chosen)])
    for seed in range(MOST_SEEDS):
        base = tiny.make(name, folder / "base", seed=tiny.SEEDS.get(name, 0) + seed)
        adapters = make_adapters(base, folder / f"adapters-{seed}", configs, seed)
        wanted = oracle(base, adapters, chosen, prompts)
        num_distinct = min(len(set(text.token_ids)) for text in wanted)
        if num_distinct >= MIN_DISTINCT:
            break
    differ = not_of_base(base, prompts, [text.token_ids for text in wanted])
    changed = [each for each, name in zip(differ, chosen, strict=True) if name]
    digests = lay_out(base, folder / "store", adapters)
    runs = []
    for number in num_slots:
        tried = Tried(name, number, num_distinct=num_distinct, share_changed=sum(changed) / len(changed))
        config = ShardConfig(
            name, str(base), "unix:/dev/null", device=device, dtype="float32", max_total_tokens=128, step_tokens=40,
            adapter_store=str(folder / "store"), max_active_adapters=number,
        )  # fmt: skip
        given = through_engine(config, prompts, [digests[each] if each else "" for each in chosen])
        compare(tried, wanted, given, chosen, tie)
        runs.append(tried)
    return runs
