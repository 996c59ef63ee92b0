"""Captured steps, on CPU: a tape keeps the operations of a forward pass as a CUDA graph would keep its launches."""

import copy
import importlib.util
import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from lorikeet.proto.params import Method, SamplingParams, Speculation
from lorikeet.shard.attention import AttentionSpec, LayerKV
from lorikeet.shard.batch.inputs import StepInputs
from lorikeet.shard.batch.padding import Padding
from lorikeet.shard.batch.segments import Segment
from lorikeet.shard.model import Model
from lorikeet.shard.model.attention_binding import NAME
from lorikeet.shard.model.build import assemble
from lorikeet.shard.model.graphs import CannotCapture, Launch
from lorikeet.shard.model.moe.experts import NAME as EXPERTS
from lorikeet.shard.model.tensor_parallel.group import Group
from lorikeet.shard.speculation.drafter import DraftSettings
from tests.shard.apart import run
from tests.shard.fake_model import VOCAB_SIZE
from tests.shard.model.dense_attention import CPU, DenseAttention
from tests.shard.model.tape import TapeRecorder
from tests.shard.ranks_in_threads import together
from tests.shard.rig import Rig, Setup, make_request

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
PAGE_SIZE, NUM_PAGES, MOST_ROWS, MOST_TOKENS = 4, 40, 16, 32
VOCAB = VOCAB_SIZE
CLOSE = 2.0**-8
"""Float16; matrix products of other numbers of rows sum in another order."""


class BakingAttention(DenseAttention):
    """Keeps the positions of a step on the host, where a graph never looks again."""

    def attend(
        self, spec: AttentionSpec, kv: LayerKV, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        assert self._inputs is not None
        ids = torch.tensor(self._inputs.page_table[:, 0]).to(query.dtype).sum()
        return super().attend(spec, kv, query, key, value) * (1 + ids)


class ReadingAttention(DenseAttention):
    """Waits for the device in the middle of the step."""

    def attend(
        self, spec: AttentionSpec, kv: LayerKV, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        output = super().attend(spec, kv, query, key, value)
        return output if float(output.sum()) else output * 2


def model_with(kind: type[DenseAttention] = DenseAttention, num_layers: int = 2, device: torch.device = CPU) -> Model:
    """A tiny Llama whose layers are plain."""
    torch.manual_seed(0)
    config = config_of(num_layers)
    network, backend = network_of(config).to(device), kind(PAGE_SIZE, 64, MOST_TOKENS, device)
    return assemble(network, config, backend, torch.float16, StepInputs(PAGE_SIZE, device), MOST_TOKENS)


def config_of(num_layers: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=num_layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip


def network_of(config: LlamaConfig) -> nn.Module:
    """Random, in float16, which is packed on no device."""
    network: nn.Module = AutoModelForCausalLM.from_config(
        config, dtype=torch.float16, attn_implementation=NAME, experts_implementation=EXPERTS
    )
    return network.eval()


def padding() -> Padding:
    return Padding(MOST_ROWS, MOST_TOKENS, spare_page=NUM_PAGES)


def captured(kind: type[DenseAttention] = DenseAttention) -> tuple[Model, TapeRecorder]:
    model, recorder = model_with(kind), TapeRecorder()
    model.allocate_kv(NUM_PAGES + 1)
    model.capture(padding(), recorder, padding().all())
    return model, recorder


class Texts:
    """Requests that a model computes step by step, each with pages of its own."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._computed: dict[int, int] = {}

    def step(self, counts: dict[int, int], logits_rows: Sequence[int] | None = None) -> torch.Tensor:
        """Compute so many more tokens of each request. wanted: rows, None is all. Returns their logits."""
        segments, ids = [], []
        for request, count in counts.items():
            start = self._computed.get(request, 0)
            self._computed[request] = start + count
            pages = range(request * 8, request * 8 + 8)
            segments.append(Segment(start, count, pages))
            ids += [(31 * request + 7 * place) % VOCAB for place in range(start, start + count)]
        rows = list(range(len(ids))) if logits_rows is None else list(logits_rows)
        self._model.inputs.fill(segments, torch.tensor(ids), torch.tensor(rows, dtype=torch.long), rows)
        return self._model.forward().clone()


def plans(seed: int) -> list[dict[int, int]]:
    """Chunks, single tokens and widths of verification, mixed; some steps too large for any graph."""
    draw, left, outputs = random.Random(seed), dict.fromkeys(range(5), MOST_TOKENS), []
    while any(left.values()):
        members = [request for request in left if left[request] and draw.random() < 0.7]
        counts = {request: min(left[request], draw.choice([1, 1, 2, 4, 7])) for request in members}
        for request, count in counts.items():
            left[request] -= count
        if counts:
            outputs.append(counts)
    return outputs


@pytest.mark.parametrize("seed", range(4))
def test_replayed_steps_give_what_launched_ones_give(seed: int) -> None:
    plain = model_with()
    plain.allocate_kv(NUM_PAGES)
    graphed, recorder = captured()
    launched, replayed = Texts(plain), Texts(graphed)
    steps = plans(seed)
    for index, counts in enumerate(steps):
        num_rows = sum(counts.values())
        rows = None if index % 3 else range(num_rows - 1, -1, -2)
        expected, outputs = launched.step(counts, rows), replayed.step(counts, rows)
        assert outputs.shape == expected.shape
        assert float((outputs - expected).abs().max()) <= CLOSE
    assert recorder.num_replayed == sum(sum(counts.values()) <= MOST_ROWS for counts in steps) > 0


def test_what_is_captured_reads_no_memory_of_its_own_step() -> None:
    graphed, recorder = captured()
    before = {id(out) for tape in recorder.tapes for _, _, _, outs in tape.kept for out in outs}
    Texts(graphed).step({0: 3, 1: 1})
    assert {id(out) for tape in recorder.tapes for _, _, _, outs in tape.kept for out in outs} == before
    assert graphed.graphs is not None
    assert graphed.graphs.num_graphs == len(padding().all()) == len(recorder.tapes)
    with torch.inference_mode():
        graphed.graphs.check()


def test_rows_of_a_check_at_one_position_have_one_token() -> None:
    """On a device any of them may write its K and V last."""
    graphed, _ = captured()
    assert graphed.graphs is not None
    with torch.inference_mode():
        graphed.graphs.check()
    inputs = graphed.inputs
    places, ids = inputs.kv_slots.tolist(), inputs.input_ids.tolist()
    assert len(places) == MOST_ROWS > len(set(places)) == len(set(ids)) == PAGE_SIZE
    assert len(set(zip(places, ids, inputs.position_ids.tolist(), strict=True))) == PAGE_SIZE
    assert set(places) == set(range(NUM_PAGES * PAGE_SIZE, (NUM_PAGES + 1) * PAGE_SIZE))


def test_rows_of_padding_write_to_the_spare_page_alone() -> None:
    graphed, _ = captured()
    for binding in graphed.bindings:
        assert binding.kv is not None
        binding.kv.keys.fill_(9.0)  # type: ignore[attr-defined]
    Texts(graphed).step({2: 3})  # padded to four rows, of pages 16 and the spare one
    for binding in graphed.bindings:
        keys = binding.kv.keys.view(NUM_PAGES + 1, PAGE_SIZE, -1)  # type: ignore[union-attr]
        written = {int(page) for page in (keys != 9.0).flatten(1).any(1).nonzero()}
        assert written == {16, NUM_PAGES}


def test_rows_without_wanted_logits_are_rows_of_the_step() -> None:
    plain, (graphed, _) = model_with(), captured()
    plain.allocate_kv(NUM_PAGES)
    outputs = []
    for texts in (Texts(plain), Texts(graphed)):
        texts.step({0: MOST_ROWS}, range(MOST_ROWS - 1, -1, -1))
        outputs.append(texts.step({1: 3}, [2]))
    assert float((outputs[0] - outputs[1]).abs().max()) <= CLOSE


def test_a_pass_that_waits_for_the_device_is_rejected() -> None:
    with pytest.raises(CannotCapture, match="not permitted when stream is capturing"):
        captured(ReadingAttention)


def test_a_pass_that_depends_on_the_host_is_rejected() -> None:
    model = model_with(BakingAttention)
    model.allocate_kv(NUM_PAGES + 1)
    model.capture(padding(), TapeRecorder(), padding().all()[:1])
    texts = Texts(model)
    texts.step({0: 16})
    assert model.graphs is not None
    model.inputs.pad(Padding(MOST_ROWS, MOST_TOKENS, spare_page=3))
    model.graphs._padding = Padding(MOST_ROWS, MOST_TOKENS, spare_page=3)  # pages that it was not captured with
    with pytest.raises(CannotCapture, match="gives other logits"), torch.inference_mode():
        model.graphs.check()


def test_new_pages_drop_the_graphs() -> None:
    graphed, _ = captured()
    graphed.allocate_kv(NUM_PAGES + 1)
    assert graphed.graphs is None
    plain = model_with()
    plain.allocate_kv(NUM_PAGES)
    assert torch.equal(Texts(graphed).step({0: 5}), Texts(plain).step({0: 5}))
    assert graphed.inputs.bounds is None


@pytest.mark.parametrize(("lag", "drafts_on_device"), [(0, False), (1, False), (1, True)])
def test_an_engine_gives_the_same_texts_with_graphs(lag: int, drafts_on_device: bool) -> None:
    plain = model_with()
    plain.allocate_kv(NUM_PAGES)
    graphed, recorder = captured()
    texts = [texts_of(rig_of(plain, 0)), texts_of(rig_of(graphed, lag, drafts_on_device))]
    assert texts[0] == texts[1]
    assert recorder.num_replayed > 5


@pytest.mark.parametrize("drafts_on_device", [False, True])
def test_graphs_take_the_tokens_that_the_host_does_not_know(drafts_on_device: bool) -> None:
    model, recorder = model_with(), TapeRecorder()
    model.allocate_kv(NUM_PAGES + 1)
    rig = rig_of(model, 1, drafts_on_device)
    model.inputs.device_tokens = rig.sampler.device_tokens
    model.capture(padding(), recorder, padding().all())
    plain = model_with()
    plain.allocate_kv(NUM_PAGES)
    # a step with drafts of the host starts only once all tokens are known to it
    assert texts_of(rig, drafts_on_device) == texts_of(rig_of(plain, 0), drafts_on_device)
    assert recorder.num_replayed > 5


def rig_of(model: Model, lag: int, drafts_on_device: bool = False) -> Rig:
    return Rig(
        Setup(NUM_PAGES, PAGE_SIZE, 64, 8, commit_lag=lag, network=model, drafts=DraftSettings(8, 1, 8, 4),
              drafts_on_device=drafts_on_device)
    )  # fmt: skip


def texts_of(rig: Rig, may_draft: bool = True) -> list[list[int]]:
    """The texts of six requests: greedy, sampled, with speculative decoding, one longer than any graph."""
    requests = []
    for index in range(6):
        prompt = [(5 * index + 3 * (place % 4)) % VOCAB for place in range(3 + 4 * index)]
        sampling = SamplingParams(do_sample=index % 2 == 1, temperature=0.5, seed=index)
        speculation = Speculation(Method.LOOKUP, 3) if may_draft and index % 3 else Speculation()
        requests.append(make_request(index, prompt, 9, sampling=sampling, speculation=speculation))
    outputs = rig.run(*requests)
    return [list(outputs[index].token_ids) for index in range(6)]


def test_ranks_capture_and_replay_together() -> None:
    torch.manual_seed(0)
    config = config_of(2)
    whole = network_of(config)
    parts = [copy.deepcopy(whole) for _ in range(2)]

    def texts(group: Group | None, network: nn.Module, is_captured: bool) -> list[torch.Tensor]:
        inputs, backend = StepInputs(PAGE_SIZE, torch.device("cpu")), DenseAttention(PAGE_SIZE, 64, MOST_TOKENS)
        model = assemble(network, config, backend, torch.float16, inputs, MOST_TOKENS, group)
        model.allocate_kv(NUM_PAGES + 1)
        recorder = TapeRecorder()
        if is_captured:
            model.capture(padding(), recorder, padding().all(), is_checked=True)
        before, asked = recorder.num_replayed, Texts(model)
        outputs = [asked.step(counts) for counts in plans(1)]
        assert (recorder.num_replayed > before) is is_captured
        return outputs

    expected = texts(None, whole, is_captured=False)
    for outputs in together([partial(texts, network=part, is_captured=True) for part in parts]):
        for logits, other in zip(outputs, expected, strict=True):
            assert float((logits - other).abs().max()) <= CLOSE


def test_where_one_rank_cannot_capture_none_replays() -> None:
    config = config_of(2)
    whole = network_of(config)
    parts = [whole, copy.deepcopy(whole)]

    class Failing(TapeRecorder):
        """As on a device whose memory is used up after two graphs."""

        def __call__(self, compute: Launch) -> Launch:
            launch = super().__call__(compute)
            if len(self.tapes) == 3:
                raise CannotCapture("out of memory")
            return launch

    def capture(group: Group, network: nn.Module) -> tuple[str, list[torch.Tensor]]:
        inputs, backend = StepInputs(PAGE_SIZE, torch.device("cpu")), DenseAttention(PAGE_SIZE, 64, MOST_TOKENS)
        model = assemble(network, config, backend, torch.float16, inputs, MOST_TOKENS, group)
        model.allocate_kv(NUM_PAGES + 1)
        recorder = TapeRecorder() if group.rank == 0 else Failing()
        with pytest.raises(CannotCapture) as caught:
            model.capture(padding(), recorder, padding().all(), True, group.agree)
        assert model.graphs is None and len(recorder.tapes) == 3
        texts = Texts(model)
        return str(caught.value), [texts.step(counts) for counts in plans(1)]

    (reason, first), (same, other) = together([partial(capture, network=part) for part in parts])
    assert reason == same and reason.endswith("cannot be captured: out of memory")
    assert all(torch.equal(logits, another) for logits, another in zip(first, other, strict=True))


def run_cases(*options: str, interpreted: str = "1") -> None:
    """In a process of its own: kernels are interpreted, or not, from their import on."""
    cases = [str(Path(__file__).with_name(name)) for name in ("graphs_triton_cases.py", "kinds_triton_cases.py")]
    run("pytest", "-q", "-p", "no:cacheprovider", *cases, *options, interpreted=interpreted)


@needs_triton
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_graphs_on_the_device() -> None:
    run_cases(interpreted="0")


@needs_triton
@pytest.mark.device
def test_graphs_with_adapters_and_heads() -> None:
    run_cases()
