"""The target's own texts, and the hidden states of their tokens.

Texts are generated once per prompt, in batches, by the target or by a running server, and kept in a file from which a
stopped run resumes. Hidden states are computed once per text and stored in files of bounded size: any number of heads
can be trained on them.
"""

import hashlib
import io
import json
import os
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import httpx
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lorikeet.adapters.errors import HeadsError, first_line
from lorikeet.adapters.medusa.target import Target

Prompt = str | list[dict[str, Any]]
"""Text, or the messages of a conversation for the target to continue."""


@dataclass(frozen=True)
class EncodedPrompt:
    """One prompt in tokens."""

    ids: tuple[int, ...]
    inputs: str | None
    """Text that a server tokenizes to the same ids; None if there is none."""


def read_prompts(path: Path) -> list[Prompt]:
    """Every prompt of the file, in order. Raises HeadsError."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise HeadsError(f"the prompt file {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise HeadsError(f"the prompt file {path} is not UTF-8 text") from None
    if path.suffix == ".json":
        prompts = _list(path, text)
    elif path.suffix == ".jsonl":
        lines = enumerate(text.split("\n"), 1)
        prompts = [_prompt(_json(line, path, number), path, number) for number, line in lines if line.strip()]
    else:
        prompts = [line for line in text.splitlines() if line.strip()]
    if not prompts:
        raise HeadsError(f"the prompt file {path} is empty")
    return prompts


def encode_prompts(prompts: Sequence[Prompt], tokenizer: Any) -> list[EncodedPrompt]:
    """Tokens of every prompt. Raises HeadsError if the tokenizer has no chat template for messages."""
    return [_encode(prompt, tokenizer) for prompt in prompts]


def _encode(prompt: Prompt, tokenizer: Any) -> EncodedPrompt:
    if isinstance(prompt, str):
        return EncodedPrompt(tuple(tokenizer(prompt)["input_ids"]), prompt)
    if not tokenizer.chat_template:
        raise HeadsError("there are prompts with messages, but neither base nor adapter has a chat template")
    try:
        text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # a template may raise anything
        raise HeadsError(f"the chat template refuses a prompt's messages: {first_line(error)}") from None
    ids = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
    without = text.removeprefix(tokenizer.bos_token or "")
    sendable = (candidate for candidate in (text, without) if tuple(tokenizer(candidate)["input_ids"]) == ids)
    return EncodedPrompt(ids, next(sendable, None))


def _list(path: Path, text: str) -> list[Prompt]:
    values = _json(text, path, 1) if text.strip() else []
    if not isinstance(values, list):
        raise HeadsError(f"the prompt file {path} is not a JSON list; use .jsonl for one value per line")
    return [_prompt(value, path, number) for number, value in enumerate(values, 1)]


def _json(text: str, path: Path, number: int) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise HeadsError(f"the prompt file {path} is not JSON at line {number}: {first_line(error)}") from None


def _prompt(value: Any, path: Path, number: int) -> Prompt:
    fields = value if isinstance(value, dict) else {"prompt": value}
    text = fields.get("prompt", fields.get("inputs"))
    if isinstance(text, str) and text:
        return text
    messages = fields.get("messages")
    if isinstance(messages, list) and messages and all(isinstance(message, dict) for message in messages):
        return messages
    raise HeadsError(f"the prompt file {path} has an invalid entry {number}: give a text or an object with messages")


OWN_PROMPT_LEN = 24
"""Tokens of a prompt that the target samples."""

Progress = Callable[[int, int], None]
"""Called with the number of finished prompts and of all prompts."""


@dataclass(frozen=True)
class Text:
    """A prompt and the target's continuation."""

    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]


class TextStore:
    """Outputs by prompt number, appended to a file as they are generated, or kept in memory only."""

    def __init__(self, path: Path | None, settings: dict[str, Any]) -> None:
        """Opens or creates the file. Raises HeadsError if it holds texts of other settings."""
        self.outputs: dict[int, tuple[int, ...]] = {}
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            head = json.dumps(settings, sort_keys=True)
            if path.exists():
                self._read(path, head, settings)
            else:
                path.write_text(head + "\n")
        self._file: IO[str] = io.StringIO() if path is None else path.open("a", encoding="utf-8")

    def add(self, outputs: Iterable[tuple[int, Sequence[int]]]) -> None:
        """Pairs of prompt number and output ids; they are flushed when this returns."""
        for number, ids in outputs:
            self.outputs[number] = tuple(ids)
            self._file.write(json.dumps([number, list(ids)], separators=(",", ":")) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _read(self, path: Path, head: str, settings: dict[str, Any]) -> None:
        lines = path.read_text(encoding="utf-8").split("\n")
        if lines[0] != head:
            raise HeadsError(_difference(path, lines[0], settings))
        complete = lines[1:-1]  # an unfinished last line is left behind by a stopped run
        for line in complete:
            number, ids = json.loads(line)
            self.outputs[number] = tuple(ids)
        if lines[-1]:
            path.write_text("\n".join([head, *complete]) + "\n", encoding="utf-8")


def _difference(path: Path, head: str, settings: dict[str, Any]) -> str:
    try:
        old_settings = json.loads(head)
        names = [name for name in sorted({*old_settings, *settings}) if old_settings.get(name) != settings.get(name)]
    except (ValueError, TypeError):
        names = ["settings"]
    return f"{path} holds texts of another run (other {', '.join(names)}): use another --work, or delete that folder"


def settings_of(target: Target, encoded: Sequence[EncodedPrompt], max_new_tokens: int) -> dict[str, Any]:
    """Everything that the texts depend on, except the machine that computes them."""
    digest = hashlib.sha256(json.dumps([prompt.ids for prompt in encoded]).encode()).hexdigest()
    return {**target.identity, "prompts": digest, "length": max_new_tokens}


def fitting(encoded: Sequence[EncodedPrompt], target: Target, max_new_tokens: int) -> list[EncodedPrompt]:
    """The prompts short enough for an answer of `max_new_tokens`. Raises HeadsError if there is none."""
    room = None if target.max_len is None else target.max_len - max_new_tokens
    short_enough = [prompt for prompt in encoded if prompt.ids and (room is None or len(prompt.ids) <= room)]
    if not short_enough:
        raise HeadsError(f"no prompt leaves room for {max_new_tokens} tokens in the model's {target.max_len} positions")
    return short_enough


def write_with_target(target: Target, encoded: Sequence[EncodedPrompt], store: TextStore, writing: "Writing") -> None:
    """Let the target generate the missing texts. Batches have prompts of similar length, because padding costs time."""
    order = sorted(range(len(encoded)), key=lambda number: len(encoded[number].ids))
    for start in range(0, len(order), writing.batch_size):
        batch = order[start : start + writing.batch_size]
        if not store.outputs.keys() >= set(batch):
            written = target.write([encoded[number].ids for number in batch], writing.max_new_tokens)
            store.add(zip(batch, written, strict=True))
        writing.progress(len(store.outputs), len(encoded))


@dataclass(frozen=True)
class Writing:
    """How texts are generated."""

    max_new_tokens: int
    batch_size: int
    """Texts at a time."""
    progress: Progress


def own_prompts(target: Target, number: int, batch_size: int, seed: int) -> list[EncodedPrompt]:
    """Prompts that the target samples at temperature 1 from the start of a text."""
    begin = target.tokenizer("")["input_ids"] or [
        token for token in (target.tokenizer.bos_token_id, target.tokenizer.eos_token_id) if token is not None
    ]
    if not begin:
        raise HeadsError("the model has no token that begins a text, so it cannot sample prompts: give --prompts")
    torch.manual_seed(seed)
    sampled: dict[str, None] = {}
    for _ in range(0, 4 * number, batch_size):  # some are blank or repeated
        for ids in target.write([begin[:1]] * batch_size, OWN_PROMPT_LEN, temperature=1.0):
            text = target.tokenizer.decode(ids, skip_special_tokens=True)
            if text.strip():
                sampled[text] = None
        if len(sampled) >= number:
            break
    return encode_prompts(list(sampled)[:number], target.tokenizer)


def texts(encoded: Sequence[EncodedPrompt], store: TextStore) -> list[Text]:
    """All texts in order of prompts, without empty ones."""
    generated = [Text(prompt.ids, store.outputs[number]) for number, prompt in enumerate(encoded)]
    return [text for text in generated if text.output_ids]


BUSY = (429, 503)
BUSY_TIMEOUT_S = 120.0
"""How long a server may answer that it is busy."""
READ_TIMEOUT_S = 600.0


def write_with_server(
    url: str, adapter: str | None, encoded: Sequence[EncodedPrompt], store: TextStore, writing: Writing
) -> None:
    """Let the server at `url` generate the missing texts greedily; LORIKEET_TOKEN is its key. Raises HeadsError."""
    missing = [number for number in range(len(encoded)) if number not in store.outputs]
    limits = httpx.Limits(max_connections=writing.batch_size)
    timeout = httpx.Timeout(10.0, read=READ_TIMEOUT_S, pool=None)
    token = os.environ.get("LORIKEET_TOKEN")
    headers = {"authorization": f"Bearer {token}"} if token else {}
    with (
        httpx.Client(base_url=url, limits=limits, timeout=timeout, headers=headers) as client,
        ThreadPoolExecutor(writing.batch_size) as pool,
    ):
        bodies = (_body(encoded[number], adapter, writing.max_new_tokens) for number in missing)
        numbers = {pool.submit(_ask, client, body, encoded[i]): i for body, i in zip(bodies, missing, strict=True)}
        try:
            for answer in as_completed(numbers):
                store.add([(numbers[answer], answer.result())])
                writing.progress(len(store.outputs), len(encoded))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _body(prompt: EncodedPrompt, adapter: str | None, max_new_tokens: int) -> dict[str, Any]:
    if prompt.inputs is None:
        raise HeadsError("no text gives the tokens of a prompt's chat template: leave out --url")
    parameters: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": False, "details": True}
    if adapter is not None:
        local = (folder := Path(adapter).expanduser()).is_dir()
        parameters["adapter_id"] = str(folder.resolve()) if local else adapter
        parameters["adapter_source"] = "local" if local else "hub"
    return {"inputs": prompt.inputs, "parameters": parameters}


def _ask(client: httpx.Client, body: dict[str, Any], prompt: EncodedPrompt) -> list[int]:
    """Output ids of one prompt."""
    started = time.monotonic()
    while True:
        try:
            answer = client.post("/generate", json=body)
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            raise HeadsError(f"the server {client.base_url} cannot be reached: {first_line(error)}") from None
        if answer.status_code not in BUSY or time.monotonic() - started > BUSY_TIMEOUT_S:
            break
        time.sleep(0.5)
    if answer.status_code != 200:
        raise HeadsError(f"the server {client.base_url} answers with status {answer.status_code}: {_reason(answer)}")
    return _output(answer, prompt, str(client.base_url))


def _output(answer: httpx.Response, prompt: EncodedPrompt, url: str) -> list[int]:
    try:
        details = answer.json()["details"]
        ids = [int(token["id"]) for token in details["tokens"]]
        num_prompt = details.get("prompt_tokens", len(details.get("prefill", ())))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise HeadsError(f"the server {url} answers without details.tokens: it has no /generate like LoRAX's") from None
    if num_prompt and num_prompt != len(prompt.ids):
        problem = f"counts {num_prompt} tokens in a prompt of {len(prompt.ids)}"
        raise HeadsError(f"the server {url} {problem}: it serves another model")
    return ids


def _reason(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["error"])
    except (ValueError, KeyError, TypeError):
        return answer.text[:200].replace("\n", " ")


SHARD_BYTES = 256 * 2**20
MAX_BATCH_TOKENS = 8192
"""Maximum tokens of one forward pass, including padding."""
NOTHING = -100
"""The label for a position after the end of the text."""


@dataclass(frozen=True)
class Shard:
    """Rows of some texts, one per generated token: the hidden state that the output head turned into that token."""

    rows: Tensor
    """[rows, H], bfloat16."""
    output_ids: Tensor
    """[rows]: the generated token of each row."""
    remaining: Tensor
    """[rows]: generated tokens of the same text after this one."""

    def labels(self, num_heads: int) -> Tensor:
        """[rows, heads]: the token that head h must predict, h + 1 positions after the row's own."""
        return labels_of(self.output_ids, self.remaining, num_heads)


def labels_of(output_ids: Tensor, remaining: Tensor, num_heads: int) -> Tensor:
    """output_ids, remaining: [rows]. Returns [rows, heads]: the token h + 1 positions after the row's own."""
    columns = []
    for ahead in range(1, num_heads + 1):
        shifted = torch.cat([output_ids[ahead:], output_ids[:ahead]])
        columns.append(torch.where(remaining >= ahead, shifted, NOTHING))
    return torch.stack(columns, dim=1)


class HiddenFiles:
    """The shards of one run."""

    def __init__(self, folder: Path, texts: Sequence[Text], hidden_size: int, seed: int) -> None:
        """The seed shuffles the texts, so that each shard is a fair sample of all."""
        self._folder = folder
        self._parts = deal(texts, max(1, SHARD_BYTES // (2 * hidden_size)), seed)
        self.num_rows = [sum(len(text.output_ids) for text in part) for part in self._parts]
        """Per shard."""

    def compute(self, target: Target, settings: dict[str, Any], progress: Callable[[int, int], None]) -> None:
        """Compute the missing shards; those of other settings are deleted first."""
        self._folder.mkdir(parents=True, exist_ok=True)
        note, head = self._folder / "settings.json", json.dumps(settings, sort_keys=True)
        if not note.exists() or note.read_text() != head:
            for path in self._folder.glob("rows-*.safetensors"):
                path.unlink()
            note.write_text(head)
        done, total = 0, sum(self.num_rows)
        for number, part in enumerate(self._parts):
            num_before = done
            if not self._path(number).exists():
                self._write(number, part, target, lambda more: progress(num_before + more, total))  # noqa: B023 (called at once)
            done += self.num_rows[number]
            progress(done, total)

    def load(self, number: int, device: torch.device) -> Shard:
        tensors = load_file(self._path(number), device=str(device))
        return Shard(tensors["rows"], tensors["output_ids"].long(), tensors["remaining"])

    def _write(self, number: int, part: Sequence[Text], target: Target, progress: Callable[[int], None]) -> None:
        """The file appears complete or not at all."""
        offsets = [0]
        for text in part:
            offsets.append(offsets[-1] + len(text.output_ids))
        rows = torch.empty(offsets[-1], target.hidden_size, dtype=torch.bfloat16)
        done = 0
        for batch in batches(part):
            for index, hidden in zip(batch, written_rows(target, [part[i] for i in batch]), strict=True):
                rows[offsets[index] : offsets[index + 1]] = hidden.to("cpu", torch.bfloat16)
                done += len(hidden)
            progress(done)
        tensors = {
            "rows": rows,
            "output_ids": torch.tensor([token for text in part for token in text.output_ids], dtype=torch.int32),
            "remaining": torch.cat([torch.arange(len(t.output_ids) - 1, -1, -1, dtype=torch.int32) for t in part]),
        }
        scratch = self._path(number).with_suffix(".part")
        save_file(tensors, scratch)
        os.replace(scratch, self._path(number))

    def _path(self, number: int) -> Path:
        return self._folder / f"rows-{number:05d}.safetensors"


def deal(texts: Sequence[Text], rows_per_shard: int, seed: int) -> list[list[Text]]:
    """Texts in an order given by the seed, split when a shard is full."""
    order = random.Random(f"{seed} shards").sample(list(texts), len(texts))
    parts: list[list[Text]] = [[]]
    room = rows_per_shard
    for text in order:
        if room < len(text.output_ids) and parts[-1]:
            parts.append([])
            room = rows_per_shard
        parts[-1].append(text)
        room -= len(text.output_ids)
    return parts


def batches(texts: Sequence[Text]) -> Iterator[list[int]]:
    """Indices of texts of similar length that form one forward pass."""
    order = sorted(range(len(texts)), key=lambda i: len(texts[i].prompt_ids) + len(texts[i].output_ids))
    batch: list[int] = []
    for index in order:
        length = len(texts[index].prompt_ids) + len(texts[index].output_ids)
        if batch and length * (len(batch) + 1) > MAX_BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def written_rows(target: Target, texts: Sequence[Text]) -> Iterator[Tensor]:
    """Per text the rows that its generated tokens came from, [generated tokens, H]."""
    sequences = [(*text.prompt_ids, *text.output_ids) for text in texts]
    for rows, text in zip(target.rows(sequences), texts, strict=True):
        yield rows[len(text.prompt_ids) - 1 : -1]
