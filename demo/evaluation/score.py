"""Exact match: a model's greedy text must equal the answer. Plain transformers, with PEFT for an adapter."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from peft import PeftModel
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast, StoppingCriteria, StoppingCriteriaList

from lorikeet.demo.data.tasks.example import Example

BATCH_SIZE = 50


@dataclass(frozen=True)
class Written:
    """The generated text for one example."""

    example: Example
    text: str
    """Up to EOS, or to the first difference from the answer unless the whole text was asked for."""
    ended: bool

    @property
    def is_right(self) -> bool:
        return self.ended and self.example.matches(self.text)


class _StopAtMismatch(StoppingCriteria):
    """Ends a row as soon as its text differs from the answer."""

    def __init__(self, answers: Sequence[str], prompt_len: int, tokenizer: PreTrainedTokenizerFast) -> None:
        self._answers = answers
        self._prompt_len = prompt_len
        self._tokenizer = tokenizer

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: object) -> Tensor:
        """input_ids [rows, tokens so far] → [rows] bool."""
        texts = self._tokenizer.batch_decode(input_ids[:, self._prompt_len :], skip_special_tokens=True)
        mismatches = [not answer.startswith(text) for answer, text in zip(self._answers, texts, strict=True)]
        return torch.tensor(mismatches, device=input_ids.device)


def write(
    model: LlamaForCausalLM | PeftModel,
    tokenizer: PreTrainedTokenizerFast,
    examples: Sequence[Example],
    to_the_end: bool = False,
) -> list[Written]:
    """In order of length, so that the rows of a batch need little padding. A text that differs from the answer is
    completed only with `to_the_end`."""
    ordered = sorted(examples, key=lambda example: len(example.prompt) + len(example.answer))
    written: list[Written] = []
    for first in range(0, len(ordered), BATCH_SIZE):
        written += _write_batch(model, tokenizer, ordered[first : first + BATCH_SIZE], to_the_end)
    return written


@torch.inference_mode()
def _write_batch(
    model: LlamaForCausalLM | PeftModel,
    tokenizer: PreTrainedTokenizerFast,
    examples: Sequence[Example],
    to_the_end: bool,
) -> list[Written]:
    encoded = tokenizer(
        [example.prompt for example in examples], padding=True, padding_side="left", return_tensors="pt"
    ).to(model.device)
    prompt_len = encoded["input_ids"].shape[1]
    answers = [example.answer for example in examples]
    stops = [] if to_the_end else [_StopAtMismatch(answers, prompt_len, tokenizer)]
    out = model.generate(
        input_ids=encoded["input_ids"],
        attention_mask=encoded["attention_mask"],
        max_new_tokens=max(answer_lens(tokenizer, examples)) + 8,
        do_sample=False,
        stopping_criteria=StoppingCriteriaList(stops),
    )
    eos = set(model.generation_config.eos_token_id)
    return [
        Written(example, tokenizer.decode(ids, skip_special_tokens=True), any(token in eos for token in ids))
        for example, ids in zip(examples, out[:, prompt_len:].tolist(), strict=True)
    ]


def answer_lens(tokenizer: PreTrainedTokenizerFast, examples: Sequence[Example]) -> list[int]:
    """In tokens, without EOS."""
    ids = tokenizer([example.answer for example in examples], add_special_tokens=False)["input_ids"]
    return [len(answer) for answer in ids]
