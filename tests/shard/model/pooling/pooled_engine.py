"""An engine with an embedder or a classifier, and what transformers computes of the same prompts."""

import os
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch

from lorikeet.shard.config import ShardConfig
from lorikeet.shard.grpc.streams import Commands, Inbox, Outbox, StreamOpened
from lorikeet.shard.model import Model, load_model
from lorikeet.shard.requests.request import FinishReason, Request, Rows
from lorikeet.shard.startup.build import build_engine, pooling_of
from tests import tiny_pooled

EPOCH = 1
PARKED_S = 0.001


class PooledEngine:
    """An engine with nobody else in it."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        values = {"dtype": "float32", "max_total_tokens": 126, "step_tokens": 256, "max_running": 16} | settings
        self.config = ShardConfig(folder.name, str(folder), "unix:/dev/null", **values)
        self.model: Model = load_model(self.config)
        inbox, self.outbox = Inbox(), Outbox()
        self.engine = build_engine(self.config, self.model, inbox, self.outbox)
        self.engine.warm_up()
        self.inbox = inbox
        self.outbox.open(EPOCH, wake=lambda: None)
        inbox.put(StreamOpened(EPOCH))
        self._next_id = 0

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        second_texts: Sequence[int] = (),
        digests: Sequence[str] = (),
        per_token: Collection[int] = (),
    ) -> list[torch.Tensor]:
        """[rows, size] of each prompt, all submitted at once. `per_token`: indices of those with a row per token."""
        pooling = pooling_of(self.model)
        assert pooling is not None
        requests = []
        for index, prompt in enumerate(prompts):
            self._next_id += 1
            request = Request((EPOCH, self._next_id), list(prompt), len(prompt), 1)
            request.pooling = pooling._replace(second_text=second_texts[index] if second_texts else 0)
            if index in per_token:
                request.pooling = request.pooling._replace(rows=Rows.ALL)
            request.adapter_digest = digests[index] if digests else ""
            requests.append(request)
        self.inbox.put(Commands(EPOCH, submits=list(requests)))
        results: dict[int, bytes] = {}
        self.engine.step()
        while not self.engine.scheduler.is_idle:
            time.sleep(0.0 if self.engine.scheduler.running else PARKED_S)  # while adapters are read
            self.engine.step()
        for output in self.outbox.take(EPOCH).request_outputs():
            assert output.finish_reason is FinishReason.LENGTH, output
            results[output.key[1]] = output.pooled
        self.engine.scheduler.check()
        values = (torch.frombuffer(bytearray(results[request.key[1]]), dtype=torch.float32) for request in requests)
        return [result.view(-1, self.model.result_size) for result in values]


def prompts_of(lengths: Sequence[int] = tiny_pooled.LENGTHS, seed: int = 1) -> list[list[int]]:
    """Random prompts between [CLS] and [SEP]."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(5, tiny_pooled.VOCAB, (length - 2,), generator=generator).tolist() for length in lengths]
    return [[tiny_pooled.CLS, *row, tiny_pooled.SEP] for row in rows]


@torch.inference_mode()
def expected(
    folder: Path, task: str, prompts: Sequence[Sequence[int]], pooling: str = "mean", second_texts: Sequence[int] = ()
) -> list[torch.Tensor]:
    """[rows, size] of each prompt, alone in transformers: hidden states that are pooled, or logits."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    network = tiny_pooled.CLASSES[task].from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    results = []
    for index, prompt in enumerate(prompts):
        options: dict[str, Any] = {}
        if second_texts:
            types = [int(position >= second_texts[index]) for position in range(len(prompt))]
            options["token_type_ids"] = torch.tensor([types])
        output = network(torch.tensor([prompt]), **options)
        if task != "embed":
            results.append(output.logits[0].view(-1, output.logits.shape[-1]))
            continue
        states = output.last_hidden_state[0]
        rows = {"mean": states.mean(0, keepdim=True), "cls": states[:1], "last": states[-1:], "token": states}
        results.append(rows[pooling])
    return results
