"""Adapters with virtual tokens, new norms and tokens of their own in captured steps, as a device computes them. Run by
test_graphs.py in a process of its own, on CUDA or, with TRITON_INTERPRET=1, on CPU.
"""

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, DynamicCache

from lorikeet.proto.params import FIRST_VIRTUAL_ID
from lorikeet.shard.batch.inputs import StepInputs
from lorikeet.shard.batch.padding import Padding
from lorikeet.shard.batch.segments import Segment
from lorikeet.shard.model.adapters.added_tokens import extend
from lorikeet.shard.model.adapters.loading import AdapterFiles, HostLayout, SlotParts
from lorikeet.shard.model.adapters.upload import DeviceSlots
from lorikeet.shard.model.build import assemble
from lorikeet.shard.model.fusion.attention import FusedAttention
from lorikeet.shard.model.lora.memory import PinnedMemory
from lorikeet.shard.model.lora.served_file import FORMAT
from tests.shard.model.dense_attention import DenseAttention
from tests.shard.model.graphs_triton_cases import CountingRecorder
from tests.shard.model.lora.triton_cases import DEVICE
from tests.shard.model.test_graphs import MOST_TOKENS, NUM_PAGES, PAGE_SIZE, VOCAB, config_of, network_of
from tests.shard.near import worst_share

NUM_SLOTS, MOST_ROWS, PAGES_EACH = 4, 4, 4
NUM_VIRTUAL, NUM_PREFIX = 5, 3
CLOSE = 2.0**-7
EMBEDDING = "model.embed_tokens"
NORMS = ("model.layers.0.input_layernorm", "model.layers.0.post_attention_layernorm", "model.norm")


class Served:
    """A tiny Llama, captured, with adapters from files in its slots; the plain model next to it."""

    def __init__(self, folder: Path, fusions: str = "device", num_extra: int = 0) -> None:
        torch.manual_seed(0)
        self._folder, config = folder, config_of(1)
        network = network_of(config).to(DEVICE)
        plain = copy.deepcopy(config)
        self.plain: Any = AutoModelForCausalLM.from_config(plain, dtype=torch.float16, attn_implementation="eager")
        self.plain.load_state_dict(network.state_dict())
        self.plain.to(DEVICE).eval()
        if num_extra:
            extend(network, config, num_extra)
        backend, inputs = DenseAttention(PAGE_SIZE, 64, MOST_TOKENS, DEVICE), StepInputs(PAGE_SIZE, DEVICE)
        self.model = assemble(
            network, config, backend, torch.float16, inputs, MOST_TOKENS, fusions=fusions, num_extra=num_extra
        )
        is_fused = any(isinstance(module, FusedAttention) for module in self.model.network.modules())
        assert is_fused == (fusions == "device")
        self.model.allocate_adapters(NUM_SLOTS)
        kernels = self.model.enable_device_kernels(NUM_SLOTS, 64, 0)
        self.slots = DeviceSlots(kernels, self.model.heads, SlotParts(self.model.bindings, self.model.added_tokens))
        specs = [binding.spec for binding in self.model.bindings if binding.spec is not None]
        layers = tuple((spec.num_kv_heads, spec.key_dim, spec.value_dim) for spec in specs)
        memory = PinnedMemory(1 << 16, 1 << 14, is_pinned=DEVICE.type == "cuda")
        self.host = HostLayout(torch.float16, memory, kernels, layers)
        self.files = AdapterFiles(self.model.lora_targets, self.host)
        self.model.allocate_kv(NUM_PAGES + 1)
        self.recorder, padding = CountingRecorder(), Padding(MOST_ROWS, MOST_TOKENS, NUM_PAGES, has_adapters=True)
        padding.row_counts = [MOST_ROWS]
        graphs = [bounds for bounds in padding.all() if bounds.has_adapters and not bounds.num_drafts]
        self.model.capture(padding, self.recorder, graphs, is_checked=True)

    def put(self, slot: int, kind: str, tensors: dict[str, torch.Tensor], num_added: int = 0) -> None:
        """Put an adapter with these tensors, by module and part, into a slot, from its file."""
        path = self._folder / f"file-{slot}"
        modules = json.dumps({name.rpartition(".")[0]: {"kind": kind, "rank": 0} for name in tensors})
        facts = {"format": FORMAT, "digest": f"d{slot}", "modules": modules, "num_added": str(num_added)}
        save_file(tensors, str(path), facts)
        self.slots.put(slot, self.files.read(path))
        while not self.slots.is_ready(slot):
            pass

    def run(self, asked: "list[Asked]", is_replayed: bool = True) -> list[torch.Tensor]:
        """[2, V] of each request: logits after its prompt, and after one more token, in a step that is replayed."""
        firsts, seconds = [], []
        for place, each in enumerate(asked):
            pages = range(PAGES_EACH * place, PAGES_EACH * (place + 1))
            firsts.append((Segment(0, len(each.ids) - 1, pages, each.slot), each.ids[:-1]))
            seconds.append((Segment(len(each.ids) - 1, 1, pages, each.slot), each.ids[-1:]))
        before = self._step(firsts)
        assert self.model.inputs.bounds is None or not any(each.num_virtual for each in asked)
        num_replayed = self.recorder.num_replayed
        after = self._step(seconds)
        assert self.recorder.num_replayed == num_replayed + is_replayed
        return [torch.stack(pair) for pair in zip(before, after, strict=True)]

    def _step(self, parts: list[tuple[Segment, list[int]]]) -> list[torch.Tensor]:
        ids = torch.tensor([token for _, own in parts for token in own])
        ends = (torch.tensor([len(own) for _, own in parts]).cumsum(0) - 1).tolist()
        self.model.inputs.fill([segment for segment, _ in parts], ids, torch.tensor(ends), ends)
        return list(self.model.forward().clone())


@dataclass(frozen=True)
class Asked:
    """A request, by its tokens."""

    slot: int
    num_virtual: int
    text: tuple[int, ...]

    @property
    def ids(self) -> list[int]:
        return [*range(FIRST_VIRTUAL_ID, FIRST_VIRTUAL_ID + self.num_virtual), *self.text]


@torch.inference_mode()
def test_virtual_tokens_before_captured_steps(tmp_path: Path) -> None:
    served = Served(tmp_path)
    config = served.plain.config
    generator = torch.Generator().manual_seed(1)
    virtual = torch.randn(NUM_VIRTUAL, config.hidden_size, generator=generator) / 30
    shape = (1, 2, NUM_PREFIX, config.num_key_value_heads, config.head_dim)
    prefix = torch.randn(shape, generator=generator)
    served.put(2, "virtual", {f"{EMBEDDING}.virtual": virtual})
    nothing = torch.zeros(NUM_PREFIX, config.hidden_size)
    served.put(3, "virtual", {f"{EMBEDDING}.virtual": nothing, f"{EMBEDDING}.prefix": prefix})
    asked = [
        Asked(2, NUM_VIRTUAL, (3, 8, 5, 1)), Asked(-1, 0, (3, 8, 5, 1)),
        Asked(3, NUM_PREFIX, (3, 8, 5, 1)), Asked(2, NUM_VIRTUAL, (VOCAB - 1, 4)),
    ]  # fmt: skip
    given = served.run(asked)
    embed = served.plain.get_input_embeddings()
    for each, logits in zip(asked, given, strict=True):
        text = torch.tensor([each.text], device=DEVICE)
        embeddings, cache = embed(text), DynamicCache()
        if each.slot == 2:
            embeddings = torch.cat([virtual.half().to(DEVICE)[None], embeddings], 1)
        if each.slot == 3:
            cache.update(*(part.transpose(0, 1)[None].half().to(DEVICE) for part in prefix[0]), 0)
        wanted = served.plain(inputs_embeds=embeddings, past_key_values=cache).logits[0, -2:].float()
        assert worst_share(logits, wanted) <= CLOSE
    assert worst_share(given[0], given[1]) > 4 * CLOSE and worst_share(given[2], given[1]) > 4 * CLOSE
    for index in (0, 2):
        assert torch.equal(served.run([asked[index]])[0], given[index]), "equal bits in any batch"
    served.slots.clear(2)
    served.slots.put(2, served.files.read(tmp_path / "file-3"))
    with pytest.raises(ValueError, match="virtual tokens are not served by several devices"):
        AdapterFiles(served.model.lora_targets, served.host, None, lambda sums: sums).read(tmp_path / "file-3")
    with pytest.raises(IndexError):
        served.slots.is_ready(2)
        served.run([Asked(2, NUM_VIRTUAL, (3, 8))])


@pytest.mark.parametrize("fusions", ["device", "none"])
@torch.inference_mode()
def test_new_norms(fusions: str, tmp_path: Path) -> None:
    """Fused norms are part of captured steps; a step is not replayed where others are changed after their kernels."""
    served, is_fused = Served(tmp_path, fusions), fusions == "device"
    generator = torch.Generator().manual_seed(2)
    scales = {name: 1 + 0.3 * torch.randn(served.plain.config.hidden_size, generator=generator) for name in NORMS}
    served.put(1, "norm", {f"{name}.scale": scale for name, scale in scales.items()})
    asked = [Asked(1, 0, (3, 8, 5)), Asked(-1, 0, (3, 8, 5)), Asked(0, 0, (7, 1)), Asked(1, 0, (2, 9))]
    given = served.run(asked, is_replayed=is_fused)
    texts = [torch.tensor([each.text], device=DEVICE) for each in asked]
    bare = [served.plain(text).logits[0, -2:].float() for text in texts]
    for name, scale in scales.items():
        served.plain.get_submodule(name).weight.mul_(scale.to(DEVICE))
    changed = [served.plain(text).logits[0, -2:].float() for text in texts]
    for each, logits, own, other in zip(asked, given, bare, changed, strict=True):
        wanted, unlike = (other, own) if each.slot == 1 else (own, other)
        assert worst_share(logits, wanted) <= CLOSE < worst_share(logits, unlike) / 4
    assert torch.equal(served.run([asked[0]], is_fused)[0], given[0]), "equal bits in any batch"
    served.slots.clear(1)
    assert worst_share(served.run([asked[0]])[0], bare[0]) <= CLOSE


@torch.inference_mode()
def test_added_tokens(tmp_path: Path) -> None:
    """Rows of the adapter read and choose its tokens, as of a base that was resized; others never choose them."""
    num_extra, num_added = 3, 2
    served = Served(tmp_path, num_extra=num_extra)
    generator = torch.Generator().manual_seed(3)
    size, width = VOCAB + num_extra, served.plain.config.hidden_size
    rows = {end: torch.randn(num_added, width, generator=generator).half() / 6 for end in (EMBEDDING, "lm_head")}
    places = torch.zeros(num_added, size, dtype=torch.float16)
    places[range(num_added), range(VOCAB, VOCAB + num_added)] = 1
    tensors = {f"{EMBEDDING}.A": places, f"{EMBEDDING}.B": rows[EMBEDDING].t().contiguous()}
    tensors |= {"lm_head.A": rows["lm_head"], "lm_head.B": places.t().contiguous()}
    served.put(1, "linear", tensors, num_added)
    asked = [Asked(1, 0, (3, VOCAB + 1, 5)), Asked(-1, 0, (3, 8, 5)), Asked(0, 0, (7, 1))]
    given = served.run(asked)
    served.plain.resize_token_embeddings(VOCAB + num_added, mean_resizing=False)
    for end, own in rows.items():
        served.plain.get_submodule(end).weight[VOCAB:] = own.to(DEVICE)
    for each, logits in zip(asked, given, strict=True):
        num_known = VOCAB + num_added * (each.slot == 1)
        wanted = served.plain(torch.tensor([each.text], device=DEVICE)).logits[0, -2:, :num_known].float()
        assert worst_share(logits[:, :num_known], wanted) <= CLOSE
        assert bool((logits[:, num_known:] == float("-inf")).all())
    assert torch.equal(served.run([asked[0]])[0], given[0]), "equal bits in any batch"
    served.slots.clear(1)
    assert bool((served.run([Asked(1, 0, (3, 8))])[0][:, VOCAB:] == float("-inf")).all())
