"""Adapters with more tokens than the base: what their files may hold."""

import json
import shutil
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken as Special
from transformers import AutoTokenizer

from lorikeet.adapters.errors import AdapterInvalid
from lorikeet.adapters.formats import added_tokens, layout
from lorikeet.adapters.formats.added_tokens import Added, AddedToken
from lorikeet.adapters.formats.base_model import BaseValues, Skeleton
from lorikeet.adapters.formats.changes import PlannedReader
from lorikeet.adapters.formats.configuration import MOST_RANK, Tokenizers
from lorikeet.adapters.loader.config import LoaderConfig
from lorikeet.adapters.loader.worker import WorkerContext, WorkerJobs
from tests import tiny
from tests.adapters import making

SIZE, EXTRA, ADDED = 320, 5, 2
TOKENS = torch.cat([making.TOKENS, torch.tensor([[SIZE, SIZE + 1], [SIZE + 1, 5]])], 1)
HEAD = "base_model.model.lm_head.weight"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make("llama", tmp_path_factory.mktemp("vocabulary") / "base", tokenizer=True)


def enlarged(base: Path, num_added: int) -> Any:
    network = making.load_base(base)
    torch.manual_seed(0)
    network.resize_token_embeddings(SIZE + num_added)
    return network


def adding(base: Path, folder: Path, **settings: Any) -> Path:
    """An adapter of PEFT's on the base with ADDED tokens."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = peft.LoraConfig(r=4, **{"target_modules": ["q_proj"], **settings})
        model = peft.get_peft_model(enlarged(base, ADDED), config)
        making.randomise(model, config)
        model.save_pretrained(folder)
    return folder


def reader_of(base: Path, num_extra: int) -> tuple[PlannedReader, layout.Base]:
    skeleton = Skeleton(base, num_extra=num_extra)
    values = BaseValues(skeleton)
    return PlannedReader(skeleton), layout.Base("", "", torch.float32, making.ALL_KINDS, values, MOST_RANK["cpu"])


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
@pytest.mark.parametrize("on_ends", [False, True], ids=["saved", "LoRA on both"])
def test_the_layout_computes_what_peft_computes(name: str, on_ends: bool, tmp_path: Path) -> None:
    base = tiny.make(name, tmp_path / name)
    ends = {"gpt2": ["wte", "lm_head"]}.get(name, ["embed_tokens", "lm_head"])
    inner = "c_attn" if name == "gpt2" else "q_proj"
    targets = [*ends, inner] if on_ends and name != "gpt2" else ends if on_ends else [inner]
    adapter = adding(base, tmp_path / "adapter", target_modules=targets)
    expected = making.logits(peft.PeftModel.from_pretrained(enlarged(base, ADDED), adapter).eval(), TOKENS)
    served = making.lay_out(*reader_of(base, EXTRA), adapter)
    network = enlarged(base, EXTRA)
    with torch.no_grad():
        for end in (network.get_input_embeddings(), network.get_output_embeddings()):
            end.weight[SIZE:] = 0
    with making.applied(network, served):
        computed = making.logits(network, TOKENS)
    torch.testing.assert_close(computed[..., : SIZE + ADDED], expected, rtol=1e-4, atol=1e-4)
    assert (computed[..., SIZE + ADDED :] == 0).all()


def test_more_tokens_than_there_is_room_for(base: Path, tmp_path: Path) -> None:
    adapter = adding(base, tmp_path / "adapter")
    for num_extra in (0, ADDED - 1):
        with pytest.raises(
            AdapterInvalid, match=r"has 322 rows, the base's 320: .*--adapter-extra-vocab-size 2 or more"
        ):
            making.lay_out(*reader_of(base, num_extra), adapter)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda tensors: tensors.pop(HEAD), "it adds 2 tokens, but has 0 rows of lm_head for them"),
        (
            lambda tensors: tensors.update({HEAD: tensors[HEAD][:-1].clone()}),
            "it adds 2 tokens, but has 1 rows of lm_head",
        ),
        (lambda tensors: tensors.update({HEAD: tensors[HEAD][:300].clone()}), "lm_head has 300 rows, .* tokenizer"),
    ],
)
def test_ends_of_different_sizes_are_refused(
    change: Callable[[dict[str, torch.Tensor]], Any], reason: str, base: Path, tmp_path: Path
) -> None:
    weights = adding(base, tmp_path / "adapter") / "adapter_model.safetensors"
    tensors = load_file(weights)
    change(tensors)
    save_file(tensors, weights)
    with pytest.raises(AdapterInvalid, match=reason):
        making.lay_out(*reader_of(base, EXTRA), weights.parent)


def saved(base: Path, folder: Path, *tokens: str, special: str = "") -> dict[str, bytes]:
    """The tokenizer files of an adapter with these tokens."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.add_tokens(list(tokens))
    if special:
        tokenizer.add_tokens([Special(special, special=True, normalized=False)])
        tokenizer.eos_token = special
    tokenizer.save_pretrained(folder)
    return {name: (folder / name).read_bytes() for name in added_tokens.FILES if (folder / name).exists()}


def vocabulary(base: Path) -> dict[str, int]:
    return dict(AutoTokenizer.from_pretrained(base).get_vocab())


def test_added_tokens_are_read_with_their_flags(base: Path, tmp_path: Path) -> None:
    files = saved(base, tmp_path, "<a>", special="<end>")
    known = vocabulary(base)
    tokens = AddedToken("<a>", SIZE), AddedToken("<end>", SIZE + 1, special=True, normalized=False)
    assert added_tokens.read(files, known) == Added(tokens, "<end>")
    assert added_tokens.read({}, known) == Added()
    older = {"added_tokens.json": json.dumps({"<a>": SIZE}).encode()}
    assert added_tokens.read(older, known) == Added((AddedToken("<a>", SIZE),))
    padding = {**older, "tokenizer_config.json": b'{"pad_token": "<a>"}'}
    assert added_tokens.read(padding, known) == Added(), "no text has a token for padding"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({"<a>": SIZE + 1}, "whose ids do not follow those of the base's tokenizer, which end before 320"),
        ({"<a>": SIZE, "<b>": SIZE}, "whose ids do not follow"),
        ({"<a>": 5}, "whose ids do not follow"),
        ({"<a>": "x"}, "its tokenizer files cannot be read"),
        (["<a>"], "its tokenizer files cannot be read"),
    ],
)
def test_other_ids_are_refused(content: object, reason: str, base: Path) -> None:
    files = {"added_tokens.json": json.dumps(content).encode()}
    with pytest.raises(AdapterInvalid, match=reason):
        added_tokens.read(files, vocabulary(base))
    with pytest.raises(AdapterInvalid, match=reason):
        Tokenizers(base).check_files(files, SIZE + ADDED)


def test_tokens_need_rows(base: Path, tmp_path: Path) -> None:
    files, tokenizers = saved(base, tmp_path, "<a>", "<b>"), Tokenizers(base)
    tokenizers.check_files(files, SIZE + 2)
    with pytest.raises(AdapterInvalid, match="its token '<b>' has the id 321, but its last row is 320"):
        tokenizers.check_files(files, SIZE + 1)
    with pytest.raises(AdapterInvalid, match="trained with another tokenizer"):
        tokenizers.check_files(files)


def test_weights_that_are_stored_may_come_with_a_tokenizer_that_does_not_fit(base: Path, tmp_path: Path) -> None:
    sound = adding(base, tmp_path / "sound")
    other = shutil.copytree(sound, tmp_path / "other")
    saved(base, sound, "<a>", "<b>")
    saved(base, other, "<a>", "<b>", "<c>")
    store = str(tmp_path / "store")
    config = LoaderConfig("", str(base), adapter_store=store, dtype="float32", adapter_extra_vocab_size=EXTRA)
    jobs = WorkerJobs(WorkerContext(config))
    try:
        jobs.convert({"folder": str(sound)})
        with pytest.raises(AdapterInvalid, match="its token '<c>' has the id 322, but its last row is 321"):
            jobs.convert({"folder": str(other)})
        jobs.convert({"folder": str(sound)})
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
