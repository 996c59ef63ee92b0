"""The target: a base model with or without an adapter, in plain transformers and PEFT.

Hidden rows are captured at the input of the output head; what the model does to logits after that head is detected.
"""

import hashlib
import json
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import errors
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from lorikeet.adapters import refs
from lorikeet.adapters.errors import HeadsError, first_line
from lorikeet.adapters.sources import hub

_PROBE_LEN = 12


@dataclass(frozen=True)
class DevicePlacement:
    """Device and precision."""

    device: torch.device
    dtype: torch.dtype


class _Reached(Exception):
    """Raised at the output head, once the rows are known, to skip its product."""

    def __init__(self, rows: Tensor) -> None:
        super().__init__()
        self.rows = rows


class Target:
    """The model whose text the heads predict."""

    def __init__(self, base: str, adapter: str | None, place: DevicePlacement) -> None:
        self.place = place
        self.base_folder = model_folder(base)
        self.adapter_folder = None if adapter is None else adapter_folder(adapter)
        self.tokenizer = _tokenizer(self.base_folder, self.adapter_folder)
        self.model = _load(base, self.base_folder, place)
        self.stored_dtype = _stored_dtype(self.base_folder)
        if self.adapter_folder is not None:
            self.model = _adapted(self.model, self.adapter_folder, str(adapter), base)
        self.model.eval().requires_grad_(False)
        self._head = self.model.get_output_embeddings()
        if self._head is None:
            raise HeadsError(f"{base} has no output head, which Medusa heads need")
        self.hidden_size = int(self._head.weight.shape[1])
        self.vocab_size = int(self._head.weight.shape[0])
        self._after = self._find_transform(base)

    @property
    def identity(self) -> dict[str, str | None]:
        """Hashes of the files that the target's text depends on."""
        adapter = None if self.adapter_folder is None else folder_identity(self.adapter_folder)
        return {"model": folder_identity(self.base_folder), "adapter": adapter}

    @property
    def max_len(self) -> int | None:
        """The longest text that the model's positions allow, if the configuration gives it."""
        config = self.model.config.get_text_config()
        lengths = (getattr(config, name, None) for name in ("max_position_embeddings", "n_positions", "max_seq_len"))
        return next((int(length) for length in lengths if length), None)

    @property
    def eos_ids(self) -> list[int]:
        """Tokens that end a text."""
        ids = getattr(self.model.generation_config, "eos_token_id", None)
        ids = self.model.config.get_text_config().eos_token_id if ids is None else ids
        ids = self.tokenizer.eos_token_id if ids is None else ids
        if ids is None:
            return []
        return [int(i) for i in ids] if isinstance(ids, list | tuple) else [int(ids)]

    @torch.no_grad()
    def write(self, prompts: Sequence[Sequence[int]], max_new_tokens: int, temperature: float = 0.0) -> list[list[int]]:
        """The target's texts after these prompts, in one batch, including the token that ended a text."""
        ends = self.eos_ids
        pad = ends[0] if ends else 0
        longest = max(len(prompt) for prompt in prompts)
        ids = torch.tensor([[pad] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
        limits = {"max_new_tokens": max_new_tokens, "eos_token_id": ends or None, "pad_token_id": pad}
        config, device = GenerationConfig(**limits, **sampling), self.place.device
        written = self.model.generate(ids.to(device), attention_mask=mask.to(device), generation_config=config)
        return [_until_end(row, set(ends)) for row in written[:, longest:].tolist()]

    @torch.no_grad()
    def rows(self, texts: Sequence[Sequence[int]]) -> list[Tensor]:
        """Per text the hidden row of each of its tokens, [tokens, H]; all in one forward pass."""
        longest = max(len(text) for text in texts)
        ids = torch.tensor([list(text) + [0] * (longest - len(text)) for text in texts], device=self.place.device)
        mask = torch.tensor([[1] * len(text) + [0] * (longest - len(text)) for text in texts], device=self.place.device)
        hook = self._head.register_forward_pre_hook(_stop)
        try:
            self.model(input_ids=ids, attention_mask=mask, use_cache=False)
        except _Reached as reached:
            rows = reached.rows.reshape(len(texts), longest, self.hidden_size)
        else:
            raise HeadsError("the model does not take its logits from its output head")
        finally:
            hook.remove()
        return [row[: len(text)] for row, text in zip(rows, texts, strict=True)]

    def logits(self, rows: Tensor) -> Tensor:
        """Hidden rows [S, H] → logits [S, V], including the adapter and what follows the output head."""
        return self._after(self._head(rows.to(self.place.dtype)))

    @torch.no_grad()
    def _find_transform(self, base: str) -> Callable[[Tensor], Tensor]:
        """What the model does to its logits after the output head: the known transform that reproduces them.

        Without this, heads of a model with capped or scaled logits would be trained on wrong probabilities.
        """
        ids = list(range(1, 1 + min(_PROBE_LEN, self.vocab_size - 1)))
        (rows,) = self.rows([ids])
        logits = self.model(input_ids=torch.tensor([ids], device=self.place.device), use_cache=False).logits[0].float()
        product = self._head(rows)
        tolerance = 1e-4 if self.place.dtype == torch.float32 else 3e-2
        for transform in transforms(self.model.config.get_text_config()):
            transformed = transform(product).float()
            if transformed.shape == logits.shape and torch.allclose(
                transformed, logits, rtol=tolerance, atol=tolerance
            ):
                return transform
        raise HeadsError(f"{base} transforms its logits after the output head in an unsupported way")


def transforms(config: Any) -> Iterator[Callable[[Tensor], Tensor]]:
    """What models do to their logits after the output head: nothing, then what this configuration gives values for."""
    yield lambda logits: logits
    if cap := getattr(config, "final_logit_softcapping", None):
        yield lambda logits: torch.tanh(logits / cap) * cap
    for name in ("logit_scale", "lm_head_multiplier"):
        if isinstance(scale := getattr(config, name, None), int | float):
            yield partial(torch.mul, other=scale)
    if scaling := getattr(config, "logits_scaling", None):
        yield lambda logits: logits / scaling


def _stop(_: Any, inputs: tuple[Tensor, ...]) -> None:
    raise _Reached(inputs[0])


def _until_end(ids: list[int], ends: set[int]) -> list[int]:
    stop = next((position + 1 for position, token in enumerate(ids) if token in ends), len(ids))
    return ids[:stop]


def _tokenizer(base: Path, adapter: Path | None) -> Any:
    """The base's tokenizer, with the chat template of the adapter if it has one."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(base)
        if adapter is not None and (template := _chat_template(adapter)):
            tokenizer.chat_template = template
    except (OSError, ValueError, KeyError) as error:
        raise HeadsError(f"the tokenizer in {base} cannot be loaded: {first_line(error)}") from None
    return tokenizer


def _chat_template(folder: Path) -> str | None:
    if (folder / "chat_template.jinja").is_file():
        return (folder / "chat_template.jinja").read_text()
    if (folder / "tokenizer_config.json").is_file():
        template = json.loads((folder / "tokenizer_config.json").read_bytes()).get("chat_template")
        return template if isinstance(template, str) else None
    return None


def _load(name: str, folder: Path, place: DevicePlacement) -> Any:
    try:
        config = AutoConfig.from_pretrained(folder)
        # some versions of transformers choose SDPA for such models, which has no soft cap
        is_capped = getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=place.dtype, use_safetensors=True, attn_implementation="eager" if is_capped else None
        )
        return model.to(place.device)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise HeadsError(f"{name} cannot be loaded as a causal language model: {first_line(error)}") from None


def _stored_dtype(folder: Path) -> torch.dtype:
    """Dtype of the base's own files; heads are written in the same dtype."""
    config = json.loads((folder / "config.json").read_bytes())
    stored = getattr(torch, str(config.get("dtype") or config.get("torch_dtype") or "float32"), torch.float32)
    return stored if stored in (torch.bfloat16, torch.float16) else torch.float32


def _deepest_layer(folder: Path) -> int:
    """The highest layer number in the adapter's tensor names. PEFT ignores layers that the base does not have."""
    try:
        with safe_open(folder / "adapter_model.safetensors", framework="pt") as file:
            numbers = [re.search(r"\.(\d+)\.", name) for name in file.keys()]  # noqa: SIM118
    except SafetensorError as error:
        raise HeadsError(f"the adapter in {folder} is not a complete safetensors file: {first_line(error)}") from None
    return max((int(number[1]) for number in numbers if number), default=-1)


def _adapted(model: Any, folder: Path, name: str, base: str) -> Any:
    """The model with the adapter, merged if that changes nothing beyond float32 rounding."""
    from peft import PeftModel

    if (deepest := _deepest_layer(folder)) >= (layers := model.config.get_text_config().num_hidden_layers):
        problem = f"it has weights for layer {deepest} of {layers}"
        raise HeadsError(f"the adapter {name} does not fit the base {base}: {problem}")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="ModuleChange missing adapter keys")
            # deprecated calls of PEFT, and its warning about merging, which is not done if it applies
            warnings.filterwarnings("ignore", message=".is_gradient_checkpointing. is deprecated")
            warnings.filterwarnings("ignore", message="Model has `tie_word_embeddings=True` and a tied layer")
            adapted = PeftModel.from_pretrained(model, str(folder))
    except (RuntimeError, ValueError, KeyError, TypeError, UserWarning) as error:
        raise HeadsError(f"the adapter {name} does not fit the base {base}: {first_line(error)}") from None
    # embedding and output head may share one weight: an adapter of one must not change the other
    plain = type(adapted.get_output_embeddings()) is nn.Linear and type(adapted.get_input_embeddings()) is nn.Embedding
    mergeable = model.dtype == torch.float32 and plain
    return adapted.merge_and_unload() if mergeable else adapted


_SMALL = ["*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken"]
_MODEL = [*_SMALL, "*.safetensors"]
_NOT_THE_MODEL = ["*/*", "consolidated*", "medusa_*", "adapter_*", "optimizer*"]
_ADAPTER = [*_SMALL, "adapter_model.safetensors", "medusa_lm_head.safetensors", "medusa_lm_head.pt"]
_HASHED_WHOLE = 64 * 2**20
"""Files up to this many bytes are identified by content, larger ones by size and modification time."""


def model_folder(name: str) -> Path:
    """The folder of a model with configuration and safetensors. Raises HeadsError."""
    folder = _folder(name, "model", _MODEL, _NOT_THE_MODEL)
    if not (folder / "config.json").is_file():
        raise HeadsError(f"{name} is not a model: {folder} has no config.json")
    if not any(folder.glob("*.safetensors")):
        raise HeadsError(f"{name} has no safetensors in {folder}: other formats are not supported")
    return folder


def adapter_folder(name: str) -> Path:
    """The folder of a LoRA adapter. Raises HeadsError."""
    folder = _folder(name, "adapter", _ADAPTER, ["*/*"])
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        if not (folder / file).is_file():
            raise HeadsError(f"{name} is not an adapter in safetensors: {folder} has no {file}")
    return folder


def heads_folder(name: str) -> Path:
    """The folder of Medusa heads, which may be an adapter's too. Raises HeadsError."""
    return _folder(name, "heads", [*_ADAPTER, "*.safetensors"], ["*/*"])


def folder_identity(folder: Path) -> str:
    """A hash that changes with every file of the folder that affects the generated text."""
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if not path.is_file() or path.suffix not in (".json", ".safetensors", ".jinja", ".model", ".txt"):
            continue
        state = path.stat()
        if state.st_size <= _HASHED_WHOLE:
            content = hashlib.sha256(path.read_bytes()).hexdigest()
        else:
            content = f"{state.st_size} {state.st_mtime_ns}"
        digest.update(f"{path.name} {content}\n".encode())
    return digest.hexdigest()


def _folder(name: str, kind: str, files: list[str], other_files: list[str]) -> Path:
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if name.startswith(("/", "./", "../", "~")):
        raise HeadsError(f"the {kind} {name} does not exist: there is no such folder")
    try:
        ref = refs.parse(name)
    except ValueError as error:
        raise HeadsError(f"the {kind} {name!r} is not a folder here, and {error}") from None
    patterns: dict[str, Any] = {"allow_patterns": files, "ignore_patterns": other_files}
    try:
        download = hub.library().snapshot_download(ref.id, revision=ref.revision, **patterns)
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError):
        raise HeadsError(f"the {kind} {name} is neither a folder nor visible at the hub with this token") from None
    except errors.GatedRepoError:
        raise HeadsError(f"the {kind} {name} is gated at the hub: request access there and set HF_TOKEN") from None
    except Exception as error:  # the library passes on errors of the HTTP client that it is built on
        raise HeadsError(f"the {kind} {name} is not a folder and cannot be downloaded: {first_line(error)}") from None
    return Path(download)
