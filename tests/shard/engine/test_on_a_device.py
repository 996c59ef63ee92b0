"""The whole loop on a device that holds no values: whatever mixes host and device tensors, or reads one on the host
where it must not, fails here as it would on CUDA.
"""

from typing import cast

import pytest
import torch
from transformers import AutoModelForCausalLM

from lorikeet.proto.params import LogprobParams, Method, SamplingParams, Speculation, Verification
from lorikeet.shard.attention import AttentionSpec
from lorikeet.shard.attention.varlen import VarlenAttention
from lorikeet.shard.batch.inputs import StepInputs
from lorikeet.shard.batch.transfer import HostCopy
from lorikeet.shard.model import Model
from lorikeet.shard.model.attention_binding import NAME
from lorikeet.shard.model.build import assemble
from lorikeet.shard.model.kernels import grouped
from lorikeet.shard.model.moe.experts import NAME as EXPERTS
from lorikeet.shard.sampling import plan
from lorikeet.shard.speculation.drafter import DraftSettings
from tests import tiny
from tests.shard.rig import Rig, Setup, make_request

META = torch.device("meta")
NUM_PAGES, MOST_TOKENS = 60, 1024
SAMPLE = (("llama", 0), ("gpt2", 1), ("mixtral", 0))
SCORED = LogprobParams(wanted=True, alternatives=2, raw=True, prefill=True, prefill_alternatives=3)
DISTRIBUTIONS = (
    SamplingParams(),
    SamplingParams(do_sample=True, temperature=0.7, top_k=5, top_p=0.9, typical_p=0.9, seed=1),
    SamplingParams(repetition_penalty=1.2, frequency_penalty=0.1, presence_penalty=0.1, watermark=True),
    SamplingParams(do_sample=True, seed=2, logit_bias=((3, 1.0), (5, -2.0))),
)


class Attention(VarlenAttention):
    """FlashAttention's calls, without the arithmetic."""

    def __init__(self) -> None:
        super().__init__(kernel=lambda query, key, value, *_, **__: torch.empty_like(query))

    def verify_backend(self, spec: AttentionSpec, dtype: torch.dtype, device: torch.device) -> str:
        return ""


def waited(copy: HostCopy) -> list[torch.Tensor]:
    """Zeros instead of a device's values."""
    return [torch.zeros(tensor.shape, dtype=tensor.dtype) for tensor in copy._tensors]


def begun(copy: HostCopy, *tensors: torch.Tensor) -> None:
    assert all(tensor.device == META for tensor in tensors)
    copy._tensors, copy._event = list(tensors), None


def model_of(name: str) -> Model:
    config = tiny.config_of(name)
    with META:
        network = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation=NAME, experts_implementation=EXPERTS
        ).eval()
    backend = Attention()
    inputs = StepInputs(backend.page_size, META)
    # fused modules are verified by values
    model = assemble(network, config, backend, torch.bfloat16, inputs, MOST_TOKENS, fusions="none")
    model.allocate_kv(NUM_PAGES)
    return model


@pytest.fixture(autouse=True)
def _no_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostCopy, "__init__", begun)
    monkeypatch.setattr(HostCopy, "wait", waited)
    monkeypatch.setattr(grouped, "is_native", lambda x, matrices: True)
    monkeypatch.setitem(cast("dict[str, int]", plan._CHUNK_ELEMENTS), "meta", plan._CHUNK_ELEMENTS["cuda"])


@pytest.mark.parametrize(
    ("name", "lag"),
    [
        pytest.param(name, lag, marks=() if (name, lag) in SAMPLE else pytest.mark.long)
        for name in ("llama", "qwen2", "gpt2", "mixtral")
        for lag in (0, 1)
    ],
)
def test_nothing_of_a_step_mixes_host_and_device(name: str, lag: int) -> None:
    model = model_of(name)
    draft = model_of(name)
    rig = Rig(
        Setup(NUM_PAGES, model.page_size, 64, 8, commit_lag=lag, network=model, draft_network=draft,
              drafts=DraftSettings(8, 1, 8, 4, has_draft_model=True), vocab_size=model.info.vocab_size)
    )  # fmt: skip
    drafts = [Speculation(), Speculation(Method.LOOKUP, 3), Speculation(Method.DRAFT, 3),
               Speculation(Method.DRAFT, 2, verify=Verification.REJECTION)]  # fmt: skip
    requests = []
    for index in range(8):
        scored = SCORED if index in (2, 5) else LogprobParams()
        requests.append(
            make_request(index, [1, 2, 3, 1, 2, 3] * (1 + 2 * index), 6, sampling=DISTRIBUTIONS[index % 4],
                         logprobs=scored, speculation=drafts[(index + index // 4) % 4])
        )  # fmt: skip
    outputs = rig.run(*requests)
    assert all(outputs[index].error == "" and len(outputs[index].token_ids) == 6 for index in range(8))
