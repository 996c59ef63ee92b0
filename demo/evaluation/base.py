"""Measures the built-in demo model on held-out modules.

Two figures: bits per byte, compared with those of xz, and how many continuations of functions compile.

The rule for a continuation: the prompt is what a user of the server would send, the start of a held-out function
without indentation (decorators, signature, docstring, and the indentation of the body), after BOS. The model generates
at most MAX_NEW_TOKENS. The function ends where the model ends its document or begins a line without indentation; the
rest is dropped. Without such an end the text is cut after its last newline. It counts if `compile()` accepts prompt and
continuation together (an open bracket or `try:` fails), and if the continuation is not blank and ends the function or
has at least MIN_NEW_LINES lines.
"""

import argparse
import hashlib
import json
import lzma
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer, BatchEncoding, LlamaForCausalLM, PreTrainedTokenizerFast

from lorikeet.demo.data import corpus
from lorikeet.demo.data.corpus import CorpusFunction, SourceFile
from lorikeet.demo.training.commands import add_device_argument
from lorikeet.demo.training.model import BASE_FOLDER

WINDOW_LEN = 2048
WINDOW_STEP = 1024
"""Every token of a file is predicted once, with at least this many tokens of context if the file has them."""
NUM_CONTINUATIONS = 200
MAX_NEW_TOKENS = 200
MIN_NEW_LINES = 4
MAX_PROMPT_CHARS = 2000
TEMPERATURE, TOP_P = 0.8, 0.85
"""The best of ten settings tried on training functions."""


@dataclass(frozen=True)
class BaseReport:
    """The printed results."""

    held_out_modules: int
    held_out_bytes: int
    xz_bits_per_byte: float
    model_bits_per_byte: float
    continuations: int
    compiled: int
    reached_the_end: int
    """Continuations that reached the end, compiled or not."""


@dataclass(frozen=True)
class Continuation:
    """The model's continuation of one held-out function."""

    prompt: str
    text: str
    """Cut at the function's end or after the last complete line."""
    ended: bool

    @property
    def counts(self) -> bool:
        lines = self.text.count("\n")
        enough = bool(self.text.strip()) and (self.ended or lines >= MIN_NEW_LINES)
        return enough and corpus.compiles(self.prompt + self.text)


def xz_bits_per_byte(files: Sequence[SourceFile]) -> float:
    """`xz -9e` over all files in one stream, in order of path."""
    content = b"".join(file.text.encode() for file in files)
    return 8 * len(lzma.compress(content, preset=9 | lzma.PRESET_EXTREME)) / len(content)


def bits_per_byte(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, files: Sequence[SourceFile]) -> float:
    """Each file separately after BOS, including its end (EOS)."""
    nats = 0.0
    for file in files:
        token_ids = tokenizer.backend_tokenizer.encode(file.text).ids
        if tokenizer.decode(token_ids[1:]) != file.text:
            raise ValueError(f"{file.path} cannot be restored from its tokens")
        nats += _nats(model, [*token_ids, tokenizer.eos_token_id])
    return nats / math.log(2) / sum(len(file.text.encode()) for file in files)


@torch.inference_mode()
def _nats(model: LlamaForCausalLM, token_ids: Sequence[int]) -> float:
    """Nats of all tokens but the first."""
    total, paid = 0.0, 1
    while paid < len(token_ids):
        start = max(0, paid - WINDOW_STEP)
        window = torch.tensor([token_ids[start : start + WINDOW_LEN]], device=model.device)
        logits = model(window[:, :-1], use_cache=False).logits[0, paid - start - 1 :]
        total += cross_entropy(logits.float(), window[0, paid - start :], reduction="sum").item()
        paid = start + window.shape[1]
    return total


def held_out_functions(files: Sequence[SourceFile], count: int) -> list[CorpusFunction]:
    """A fixed selection of functions with MIN_NEW_LINES lines of body and a short prompt without tabs."""
    eligible = []
    for function in (function for file in files for function in corpus.functions(file)):
        prompt, body_len = prompt_of(function), function.source.count("\n") - function.body_line
        if body_len >= MIN_NEW_LINES and len(prompt) <= MAX_PROMPT_CHARS and "\t" not in prompt:
            eligible.append(function)
    eligible.sort(key=lambda function: hashlib.sha256(function.source.encode()).digest())
    return eligible[:count]


def prompt_of(function: CorpusFunction) -> str:
    lines = function.source.split("\n")
    body = lines[function.body_line]
    return "\n".join([*lines[: function.body_line], body[: len(body) - len(body.lstrip())]])


def continuations(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, prompts: Sequence[str], batch_size: int = 50
) -> list[Continuation]:
    """Sampled at a low temperature; repeatable on one machine."""
    results = []
    torch.manual_seed(0)
    for first in range(0, len(prompts), batch_size):
        batch = list(prompts[first : first + batch_size])
        encoded = _encode(batch, tokenizer).to(model.device)
        out = model.generate(
            encoded["input_ids"],
            attention_mask=encoded["attention_mask"],
            max_new_tokens=MAX_NEW_TOKENS,
            do_sample=True,
            temperature=TEMPERATURE,
            top_p=TOP_P,
            top_k=0,
        )
        new_ids = out[:, encoded["input_ids"].shape[1] :].tolist()
        results += [_continuation(prompt, ids, model, tokenizer) for prompt, ids in zip(batch, new_ids, strict=True)]
    return results


def _encode(prompts: Sequence[str], tokenizer: PreTrainedTokenizerFast) -> BatchEncoding:
    """Without the last space, which belongs to the next word."""
    ids = [tokenizer(prompt + "x")["input_ids"][:-1] for prompt in prompts]
    return tokenizer.pad({"input_ids": ids}, padding_side="left", return_tensors="pt")


def _continuation(
    prompt: str, new_ids: list[int], model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> Continuation:
    stops = [i for i, token in enumerate(new_ids) if token in model.generation_config.eos_token_id]
    text = tokenizer.decode(new_ids[: stops[0]] if stops else new_ids)
    complete, ended = cut(text, stopped=bool(stops))
    return Continuation(prompt[:-1], complete, ended)


def cut(text: str, stopped: bool) -> tuple[str, bool]:
    """The text up to the function's end, and True; or up to the last complete line, and False."""
    lines = text.split("\n")
    for index, line in enumerate(lines[1:], start=1):
        if line.strip() and not line[0].isspace():
            return "\n".join([*lines[:index], ""]), True
    return (text, True) if stopped else (text[: text.rfind("\n") + 1], False)


def evaluate(folder: Path, device: str) -> tuple[BaseReport, list[Continuation]]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    files = corpus.held_out_files()
    prompts = [prompt_of(function) for function in held_out_functions(files, NUM_CONTINUATIONS)]
    written = continuations(model, tokenizer, prompts)
    report = BaseReport(
        held_out_modules=len(files),
        held_out_bytes=sum(len(file.text.encode()) for file in files),
        xz_bits_per_byte=round(xz_bits_per_byte(files), 4),
        model_bits_per_byte=round(bits_per_byte(model, tokenizer, files), 4),
        continuations=len(written),
        compiled=sum(continuation.counts for continuation in written),
        reached_the_end=sum(continuation.ended for continuation in written),
    )
    return report, written


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, default=BASE_FOLDER)
    add_device_argument(parser)
    parser.add_argument("--show", type=int, default=0, help="print this many continuations")


def run(options: argparse.Namespace) -> None:
    report, written = evaluate(options.model, options.device)
    for continuation in written[: options.show]:
        result = "compiles" if continuation.counts else "does not count"
        print(f"--- {result}\n{continuation.prompt}\033[1m{continuation.text}\033[0m")
    print(f"held out: {report.held_out_modules} modules, {report.held_out_bytes:,} bytes")
    print(f"bits per byte: model {report.model_bits_per_byte}, xz -9e {report.xz_bits_per_byte}")
    print(f"continuations that compile: {report.compiled} of {report.continuations}")
    print(json.dumps(asdict(report)))
