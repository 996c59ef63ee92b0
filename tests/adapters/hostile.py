"""Broken and malicious adapters as changes to a valid one's folder, with the reason that the error must give.

The sound one is of rank 4 on q_proj and v_proj of the tiny Llama. Knows files, no reader of them.
"""

import io
import json
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from lorikeet.adapters.errors import AdapterError, AdapterInvalid, NotServed
from tests import tiny

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
Q0 = "base_model.model.model.layers.0.self_attn.q_proj"

Change = Callable[[Path], Any]


def config(**changes: Any) -> Change:
    def change(folder: Path) -> None:
        values = json.loads((folder / CONFIG).read_text())
        values.update(changes)
        (folder / CONFIG).write_text(json.dumps(values))

    return change


def tensors(edit: Callable[[dict[str, torch.Tensor]], Any]) -> Change:
    def change(folder: Path) -> None:
        values = load_file(folder / WEIGHTS)
        edit(values)
        save_file(values, folder / WEIGHTS)

    return change


def text(content: bytes) -> Change:
    return lambda folder: (folder / CONFIG).write_bytes(content)


def raw(edit: Callable[[bytes], bytes]) -> Change:
    return lambda folder: (folder / WEIGHTS).write_bytes(edit((folder / WEIGHTS).read_bytes()))


def forged(edit: Callable[[dict[str, Any]], Any]) -> Change:
    """Another header before the same bytes."""

    def again(content: bytes) -> bytes:
        length = struct.unpack("<Q", content[:8])[0]
        entries = json.loads(content[8 : 8 + length])
        edit(entries)
        head = json.dumps(entries).encode()
        return struct.pack("<Q", len(head)) + head + content[8 + length :]

    return raw(again)


def bin_file(content: bytes) -> Change:
    def change(folder: Path) -> None:
        (folder / WEIGHTS).unlink()
        (folder / "adapter_model.bin").write_bytes(content)

    return change


class Exploit:
    """Unpickled with code allowed, this would leave a mark."""

    def __init__(self, mark: str) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return (open, (self.mark, "w"))


def saved(value: Any, **how: Any) -> bytes:
    memory = io.BytesIO()
    torch.save(value, memory, **how)
    return memory.getvalue()


def compressed(content: bytes) -> bytes:
    memory = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(memory, "w", zipfile.ZIP_DEFLATED) as new:
        for entry in old.infolist():
            new.writestr(entry.filename, old.read(entry))
    return memory.getvalue()


def link_out(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "elsewhere")
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps({"weight_map": {"x": "../../etc/passwd.safetensors"}}))


def first(entries: dict[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = entries[min(key for key in entries if key != "__metadata__")]
    return values


def put(key: str, value: torch.Tensor) -> Change:
    return tensors(lambda values: values.update({key: value}))


def nested(depth: int) -> bytes:
    return b'{"r": ' + b"[" * depth + b"]" * depth + b"}"


NAN, INFINITE = torch.full((4, 64), torch.nan), torch.full((4, 64), torch.inf)

CASES: dict[str, tuple[Change, type[AdapterError], str]] = {
    # the configuration as a file
    "no configuration": (lambda folder: (folder / CONFIG).unlink(), AdapterInvalid, "adapter_config.json"),
    "an empty configuration": (text(b""), AdapterInvalid, "not JSON"),
    "no JSON": (text(b"{'r': 8}"), AdapterInvalid, "not JSON"),
    "not UTF-8": (text(b"\xff\xfe{}"), AdapterInvalid, "not JSON"),
    "UTF-16": (text('{"peft_type": "LORA"}'.encode("utf-16")), AdapterInvalid, "not JSON"),
    "a byte order mark": (text(b'\xef\xbb\xbf{"peft_type": "LORA"}'), AdapterInvalid, "not JSON"),
    "a list": (text(b"[]"), AdapterInvalid, "not a JSON object"),
    "nested deeply": (text(nested(40)), AdapterInvalid, "nested"),
    "nested without end": (text(nested(200_000)), AdapterInvalid, "JSON"),
    "a huge configuration": (text(b" " * (2 << 20)), AdapterInvalid, "bytes"),
    "NaN as a setting": (text(b'{"peft_type": "LORA", "lora_alpha": NaN}'), AdapterInvalid, "not JSON"),
    "an empty object": (text(b"{}"), AdapterInvalid, "peft_type"),
    # what it asks for
    "no rank": (config(r=0), AdapterInvalid, "`r`"),
    "a negative rank": (config(r=-4), AdapterInvalid, "`r`"),
    "a huge rank": (config(r=1 << 40), AdapterInvalid, "`r`"),
    "a rank above the most": (config(r=513), AdapterInvalid, "from 1 to 512"),
    "a rank of text": (config(r="8"), AdapterInvalid, "`r`"),
    "a rank of truth": (config(r=True), AdapterInvalid, "`r`"),
    "another rank": (config(r=16), AdapterInvalid, r"shape \[4, 64\], but must have \[16, 64\]"),
    "a huge rank by pattern": (config(rank_pattern={"q_proj": 1 << 30}), AdapterInvalid, "`rank_pattern`"),
    "an infinite scaling": (config(lora_alpha=1e300), AdapterInvalid, "`lora_alpha`"),
    "targets of numbers": (config(target_modules=[1, 2]), AdapterInvalid, "`target_modules`"),
    "targets that are not there": (config(target_modules=["zz"]), AdapterInvalid, "zz"),
    "no pattern": (config(target_modules="(((q_proj"), AdapterInvalid, "regular expression"),
    "layers of text": (config(layers_to_transform="0"), AdapterInvalid, "`layers_to_transform`"),
    "a layer that is not there": (config(layers_to_transform=[7]), AdapterInvalid, "not found"),
    "an unknown bias": (config(bias="some"), AdapterInvalid, "`bias`"),
    "LoRA as prefix tuning": (config(peft_type="PREFIX_TUNING"), AdapterInvalid, "`prompt_embeddings`"),
    "LoRA as prompt tuning": (config(peft_type="PROMPT_TUNING"), AdapterInvalid, "`prompt_embeddings`"),
    "LoRA as IA3": (config(peft_type="IA3"), AdapterInvalid, "matches no module"),
    "LoRA as LoHa": (config(peft_type="LOHA"), AdapterInvalid, "matches no module"),
    "LoRA as AdaLoRA": (config(peft_type="ADALORA", total_step=9), AdapterInvalid, "."),
    "LoRA as MiSS with a huge rank": (config(peft_type="MISS", r=1 << 40), AdapterInvalid, "`r`"),
    "LoRA as VeRA with a large rank": (config(peft_type="VERA", r=1 << 29), AdapterInvalid, "."),
    "an unknown kind": (config(peft_type="__import__"), NotServed, "__import__"),
    "another task": (config(task_type="SEQ_CLS"), NotServed, "SEQ_CLS"),
    "PiSSA": (config(init_lora_weights="pissa_niter_4"), NotServed, "pissa"),
    "replicated layers": (config(layer_replication=[[0, 1], [0, 2]]), NotServed, "replicated"),
    "trained tokens that are not in the file": (config(trainable_token_indices=[1, 2]), AdapterInvalid, "lacks the"),
    "trained tokens of text": (config(trainable_token_indices="ab"), AdapterInvalid, "`trainable_token_indices`"),
    "aLoRA with trained tokens": (
        config(alora_invocation_tokens=[1], trainable_token_indices=[1]),
        NotServed,
        "single trained tokens together",
    ),
    "aLoRA with QALoRA": (config(alora_invocation_tokens=[1], use_qalora=True), NotServed, "`use_qalora` together"),
    "aLoRA with DoRA": (config(alora_invocation_tokens=[1], use_dora=True), NotServed, "DoRA together with"),
    "aLoRA with modules": (config(alora_invocation_tokens=[1], modules_to_save=["x"]), NotServed, "whole modules"),
    "aLoRA with biases": (config(alora_invocation_tokens=[1], bias="all"), NotServed, "`bias` together with"),
    "aLoRA of text": (config(alora_invocation_tokens="now"), AdapterInvalid, "token ids"),
    "aLoRA of negative tokens": (config(alora_invocation_tokens=[-1]), AdapterInvalid, "token ids"),
    "aLoRA of too many tokens": (config(alora_invocation_tokens=[1] * 257), AdapterInvalid, "at most 256"),
    "a setting of tomorrow": (
        config(use_quantum=True, peft_version="99.1.0"),
        NotServed,
        r"use_quantum.*saved by PEFT 99\.1\.0",
    ),
    "KaSA by its defaults": (config(kasa_config={}), AdapterInvalid, "lacks the tensor .*lora_diag"),
    "Arrow by its defaults": (config(arrow_config={}), NotServed, "Arrow"),
    "a rank of null": (config(r=None), AdapterInvalid, "`r` .* is null"),
    "a scaling of null": (config(lora_alpha=None), AdapterInvalid, "`lora_alpha` .* is null"),
    "a dropout above one": (config(lora_dropout=2.0), AdapterInvalid, "`lora_dropout`"),
    "one parameter by two names": (
        put(f"{Q0}.lora_A.default.weight", torch.ones(4, 64)),
        AdapterInvalid,
        "values of one parameter",
    ),
    "a saved norm": (config(modules_to_save=["norm"]), AdapterInvalid, "lacks the tensor"),
    "a saved block": (config(modules_to_save=["mlp"]), AdapterError, "mlp"),
    # the weights as a file
    "no weights": (lambda folder: (folder / WEIGHTS).unlink(), AdapterInvalid, "there is no|holds no"),
    "empty weights": (raw(lambda content: b""), AdapterInvalid, "empty"),
    "five bytes": (raw(lambda content: b"12345"), AdapterInvalid, "not a safetensors"),
    "truncated weights": (raw(lambda content: content[:-100]), AdapterInvalid, "truncated"),
    "truncated in the header": (raw(lambda content: content[:200]), AdapterInvalid, "truncated"),
    "bytes too many": (raw(lambda content: content + b"x" * 16), AdapterInvalid, "beyond"),
    "a header without end": (raw(lambda content: b"\xff" * 8 + content[8:]), AdapterInvalid, "header claims"),
    "a header of noise": (raw(lambda content: content[:8] + b"\x93" * len(content[8:])), AdapterInvalid, "not JSON"),
    "a page of HTML": (raw(lambda content: b"<html>" + content), AdapterInvalid, "safetensors"),
    "an LFS pointer": (
        raw(lambda content: b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n"),
        AdapterInvalid,
        "safetensors",
    ),
    "a forged place": (forged(lambda entries: first(entries)["data_offsets"].reverse()), AdapterInvalid, "bytes"),
    "overlapping places": (
        forged(lambda entries: [entries[key].update(data_offsets=[0, 1024]) for key in entries if "lora_A" in key]),
        AdapterInvalid,
        "overlaps another tensor",
    ),
    "a forged shape": (
        forged(lambda entries: first(entries).update(shape=[1 << 40, 1 << 40])),
        AdapterInvalid,
        "shape",
    ),
    "a negative shape": (forged(lambda entries: first(entries).update(shape=[-4, -64])), AdapterInvalid, "invalid"),
    "an unknown type": (forged(lambda entries: first(entries).update(dtype="F128")), AdapterInvalid, "F128"),
    "whole numbers": (put(f"{Q0}.lora_A.weight", torch.ones(4, 64, dtype=torch.int32)), AdapterInvalid, "I32"),
    "a name without end": (put("x" * 4000, torch.ones(1)), AdapterInvalid, "name"),
    # what is in them
    "NaN": (put(f"{Q0}.lora_A.weight", NAN), AdapterInvalid, "not finite.*q_proj"),
    "infinity": (put(f"{Q0}.lora_A.weight", INFINITE), AdapterInvalid, "not finite.*q_proj"),
    "another base": (put(f"{Q0}.lora_A.weight", torch.ones(4, 128)), AdapterInvalid, "another base"),
    "three axes": (put(f"{Q0}.lora_A.weight", torch.ones(4, 64, 1)), AdapterInvalid, "shape"),
    "a tensor too many": (
        put("base_model.model.model.layers.9.zz.lora_A.weight", torch.ones(4, 64)),
        AdapterInvalid,
        "zz",
    ),
    "a norm that is not finite": (
        put("base_model.model.model.norm.weight", torch.full((64,), torch.nan)),
        AdapterInvalid,
        "not finite.*model.norm",
    ),
    "a norm of another base": (
        put("base_model.model.model.norm.weight", torch.full((32,), 2.0)),
        AdapterInvalid,
        "model.norm",
    ),
    "a tensor too few": (tensors(lambda values: values.pop(f"{Q0}.lora_B.weight")), AdapterInvalid, "lacks.*q_proj"),
    "no tensor of a module": (
        tensors(lambda values: [values.pop(key) for key in list(values) if key.startswith(Q0)]),
        AdapterInvalid,
        "lacks.*q_proj",
    ),
    "DoRA without magnitudes": (config(use_dora=True), AdapterInvalid, "lacks.*magnitude"),
    "more rows of the embedding": (
        put("base_model.model.model.embed_tokens.weight", torch.ones(tiny.VOCAB + 2, 64)),
        AdapterInvalid,
        "322 rows, the base's 320",
    ),
    "more rows of the head": (put("base_model.model.lm_head.weight", torch.ones(330, 64)), AdapterInvalid, "330 rows"),
    # pickles
    "a pickle with code": (
        bin_file(pickle.dumps({"x": Exploit("/tmp/must-not-exist-by-pickle")})),
        AdapterInvalid,
        "convert it to safetensors",
    ),
    "an archive with code": (
        bin_file(saved({"x": Exploit("/tmp/must-not-exist-by-archive")})),
        AdapterInvalid,
        "was not run",
    ),
    "an old archive": (
        bin_file(saved({"x": torch.ones(1)}, _use_new_zipfile_serialization=False)),
        AdapterInvalid,
        "x matches no module",
    ),
    "an old archive with code": (
        bin_file(saved({"x": Exploit("/tmp/must-not-exist-by-old")}, _use_new_zipfile_serialization=False)),
        AdapterInvalid,
        "was not run",
    ),
    "a truncated old archive": (
        bin_file(saved({"x": torch.ones(4096)}, _use_new_zipfile_serialization=False)[:-600]),
        AdapterInvalid,
        "cannot be read",
    ),
    "an old archive that claims too much": (
        bin_file(
            saved({"x": torch.ones(4096)}, _use_new_zipfile_serialization=False).replace(
                b"M\x00\x10", b"J\xff\xff\xff\x7f"
            )
        ),
        AdapterInvalid,
        "cannot be read",
    ),
    "a compressed archive": (bin_file(compressed(saved({"x": torch.zeros(1 << 20)}))), AdapterInvalid, "compressed"),
    "a truncated archive": (bin_file(saved({"x": torch.ones(4096)})[:-600]), AdapterInvalid, "broken"),
    "an archive of a list": (bin_file(saved([torch.ones(1)])), AdapterInvalid, "no dictionary"),
    "an archive of numbers": (bin_file(saved({"x": 1})), AdapterInvalid, "other than named tensors"),
    "sparse tensors": (bin_file(saved({"x": torch.eye(4).to_sparse()})), AdapterInvalid, "adapter_model.bin"),
    "a tensor without end": (
        bin_file(saved({f"{Q0}.lora_A.weight": torch.zeros(1).expand(1 << 20, 1 << 20)})),
        AdapterInvalid,
        "repeats its values",
    ),
    # paths
    "parts elsewhere": (link_out, AdapterInvalid, "not a part of this adapter|names no|holds no"),
}
