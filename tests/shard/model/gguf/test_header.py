"""Headers of `.gguf` files: what is broken or hostile is rejected with the reason, before it takes memory."""

import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lorikeet.proto.gguf.header import Header
from lorikeet.shard.model.gguf.file import GgufFile
from tests import tiny
from tests.shard.model.gguf.files import answer_of, split_model, write_model

gguf = pytest.importorskip("gguf")
HUGE = 2**62


def text(value: str) -> bytes:
    stored = value.encode()
    return struct.pack("<Q", len(stored)) + stored


def entry(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(name: str, shape: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    """`shape`: as files have it, rows first."""
    dimensions = b"".join(struct.pack("<Q", size) for size in shape)
    return text(name) + struct.pack("<I", len(shape)) + dimensions + struct.pack("<IQ", kind, offset)


ARCHITECTURE = entry("general.architecture", 8, text("llama"))
GOOD = {"entries": [ARCHITECTURE], "tensors": [tensor("a.weight", (32, 2)), tensor("b", (8,), offset=256)]}


def written(folder: Path, **parts: Any) -> Path:
    """A file of these parts, with 512 bytes of data."""
    parts = GOOD | parts
    entries, tensors = parts["entries"], parts["tensors"]
    counts = parts.get("counts", (len(tensors), len(entries)))
    header = b"GGUF" + struct.pack("<IQQ", parts.get("version", 3), *counts) + b"".join((*entries, *tensors))
    path = folder / "made.gguf"
    path.write_bytes(header + bytes(-len(header) % 32) + bytes(512))
    return path


def test_a_good_header(tmp_path: Path) -> None:
    values = {
        "u8": (0, struct.pack("<B", 7), 7),
        "i64": (11, struct.pack("<q", -(2**40)), -(2**40)),
        "f32": (6, struct.pack("<f", 0.5), 0.5),
        "bool": (7, b"\1", True),
        "text": (8, text("né"), "né"),
        "numbers": (9, struct.pack("<IQ3i", 5, 3, 1, -2, 3), [1, -2, 3]),
        "flags": (9, struct.pack("<IQ", 7, 2) + b"\1\0", [True, False]),
        "texts": (9, struct.pack("<IQ", 8, 2) + text("a") + text("bc"), ["a", "bc"]),
        "none": (9, struct.pack("<IQ", 4, 0), []),
    }
    entries = [ARCHITECTURE, *(entry(key, kind, stored) for key, (kind, stored, _) in values.items())]
    header = Header.of_file(written(tmp_path, entries=entries))
    assert {key: header.value(key) for key in values} == {key: value for key, (_, _, value) in values.items()}
    assert header.value("absent") is None
    shapes = {name: place.shape for name, place in header.tensors.items()}
    assert shapes == {"a.weight": (2, 32), "b": (8,)}
    assert header.tensors["b"].offset - header.tensors["a.weight"].offset == 256


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ({"version": 1}, "its version is 1, and only 2 and 3 are supported"),
        ({"version": 3 << 24}, "it is big-endian: use the little-endian file"),
        ({"counts": (HUGE, 1)}, f"it should have {HUGE} tensors, and the file is too short"),
        ({"counts": (2, HUGE)}, f"it should have {HUGE} entries of metadata, and the file is too short"),
        ({"entries": [ARCHITECTURE] * 2}, r"its metadata has general\.architecture twice"),
        ({"entries": [entry("x", 99, b"")]}, "its metadata x has the unknown type 99"),
        ({"entries": [entry("x", 8, struct.pack("<Q", HUGE))]}, "its header is longer than the file"),
        ({"entries": [struct.pack("<Q", 2**64 - 1)]}, "its header is longer than the file"),
        (
            {"entries": [text("x")[:-1] + b"\xff" + struct.pack("<IB", 0, 0)]},
            "a key of its metadata is no text in UTF-8",
        ),
        *(
            ({"entries": [entry("x", 9, struct.pack("<IQ", kind, HUGE))]}, f"it should have {HUGE} items of x")
            for kind in (0, 8, 10)
        ),
        ({"entries": [entry("x", 9, struct.pack("<IQ", 9, 1))]}, "its metadata x has items of the type 9"),
        *(
            ({"entries": [entry("general.alignment", 4, struct.pack("<I", size))]}, f"its general.alignment is {size}")
            for size in (0, 24, 2**31)
        ),
        ({"entries": [entry("general.alignment", 8, text("32"))]}, "its general.alignment is 32, which must be"),
        ({"tensors": [tensor("a", ())]}, "its tensor a has 0 dimensions, not 1 to 4"),
        ({"tensors": [tensor("a", (1,) * 5)]}, "its tensor a has 5 dimensions"),
        ({"tensors": [tensor("a", (0, 3))]}, "its tensor a is empty"),
        ({"tensors": [tensor("a", (32, 2), kind=77)]}, "its tensor a has the unknown type 77"),
        (
            {"tensors": [tensor("a", (32, 2), kind=31)]},
            "its tensor a has the type Q4_0_4_4, which ggml writes to no file today",
        ),
        ({"tensors": [tensor("a", (48, 2), kind=2)]}, "its tensor a has rows of 48 values, not a multiple of 32"),
        ({"tensors": [tensor("a", (2**40, 2**40))]}, r"its tensor a ends at byte \d+, and the file has"),
        ({"tensors": [tensor("a", (8,), offset=2**64 - 32)]}, r"its tensor a ends at byte \d+, and the file has"),
        ({"tensors": [tensor("a", (8,), offset=8)]}, "its tensor a does not lie at a multiple of 32 bytes"),
        ({"tensors": [tensor("a", (8,)), tensor("a", (8,), offset=32)]}, "it has the tensor a twice"),
        ({"tensors": [tensor("b", (16,), offset=32), tensor("a", (16,))]}, "its tensors a and b overlap"),
    ],
)
def test_what_is_refused(parts: dict[str, Any], reason: str, tmp_path: Path) -> None:
    path = written(tmp_path, **parts)
    tracemalloc.start()
    with pytest.raises(ValueError, match=reason):
        GgufFile(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20


@pytest.mark.parametrize("data", [b"", b"GGU", b"GGUX" + bytes(100), b"GGUF\3\0\0\0"])
def test_files_that_are_none(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "made.gguf"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"made\.gguf cannot be read as a \.gguf file"):
        GgufFile(path)


def test_every_shorter_file_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path)
    data = path.read_bytes()
    for length in range(0, len(data) - 224, 7):
        path.write_bytes(data[:length])
        with pytest.raises(ValueError, match=r"cannot be read as a \.gguf file"):
            GgufFile(path)


def test_a_file_that_becomes_shorter_while_it_is_read(tmp_path: Path) -> None:
    path = written(tmp_path)
    file = GgufFile(path)
    path.write_bytes(path.read_bytes()[:-300])
    with pytest.raises(ValueError, match="its tensor b is cut off"):
        file.dense("b")


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        ({"llama.block_count": 2**31}, "its metadata says 2147483648 layers, and it has 12 tensors"),
        ({"llama.attention.head_count": 0}, "transformers cannot read its metadata"),
        ({"llama.embedding_length": 2**31}, "its tensor "),
        ({"llama.feed_forward_length": 2**31}, "its tensor blk.0.ffn_"),
        ({"llama.attention.key_length": 2**30}, "its tensor "),
        ({"llama.rope.scaling.type": "yarn"}, "its positions are scaled"),
    ],
)
def test_numbers_that_do_not_match_the_tensors(metadata: dict[str, Any], reason: str, tmp_path: Path) -> None:
    plain = tiny.make("llama", tmp_path / "plain", tokenizer=True, num_hidden_layers=1)
    write_model(plain, tmp_path / "tiny.gguf", metadata=metadata)
    answer = answer_of(tmp_path / "tiny.gguf", tmp_path / "made", needs_tokenizer=False)
    assert answer["error"].startswith("tiny cannot be served: " + reason), answer


def test_a_model_in_parts(tmp_path: Path) -> None:
    plain = tiny.make("llama", tmp_path / "plain", tokenizer=True, num_hidden_layers=1)
    write_model(plain, tmp_path / "whole.gguf", "Q8_0")
    parts = split_model(tmp_path / "whole.gguf", tmp_path / "parts", 3)
    whole, file = GgufFile(tmp_path / "whole.gguf"), GgufFile(parts[0])
    assert file.tensors.keys() == whole.tensors.keys() and file.paths == parts
    assert all(torch.equal(file.dense(name), whole.dense(name)) for name in whole.tensors)
    assert answer_of(parts[0], tmp_path / "made", needs_tokenizer=False)["path"] == str(tmp_path / "made")
    names = {path.name for path in (tmp_path / "made").iterdir()}
    assert {"model.gguf", "model-00002-of-00003.gguf", "model-00003-of-00003.gguf"} <= names
    assert GgufFile(tmp_path / "made" / "model.gguf").tensors.keys() == whole.tensors.keys()


def test_parts_that_do_not_belong_together(tmp_path: Path) -> None:
    plain = tiny.make("llama", tmp_path / "plain", tokenizer=True, num_hidden_layers=1)
    write_model(plain, tmp_path / "whole.gguf", "Q8_0")
    first, second, third = split_model(tmp_path / "whole.gguf", tmp_path / "parts", 3)
    with pytest.raises(ValueError, match=r"it is part 2 of 3: give the first part"):
        GgufFile(second)
    with pytest.raises(ValueError, match=r"it must be called NAME-00001-of-00003\.gguf"):
        GgufFile(first.rename(tmp_path / "parts" / "first.gguf"))
    first = (tmp_path / "parts" / "first.gguf").rename(first)
    data = second.read_bytes()
    second.write_bytes(third.read_bytes())
    with pytest.raises(ValueError, match=r"00002-of-00003\.gguf is not part 2 of 3 of the same model"):
        GgufFile(first)
    second.unlink()
    with pytest.raises(ValueError, match=r"00002-of-00003\.gguf cannot be read as a \.gguf file: .*No such file"):
        GgufFile(first)
    second.write_bytes(data)
    assert np.isfinite(GgufFile(first).dense("output_norm.weight").numpy()).all()
