"""Digests equal those of common command-line tools."""

import subprocess
from pathlib import Path

from lorikeet.proto import digest


def test_of_files_is_sha256sum_of_sha256sum(tmp_path: Path) -> None:
    for name, content in {"b.json": b"{}", "a-1.bin": b"\0" * 70_000, "a.bin": b""}.items():
        (tmp_path / name).write_bytes(content)
    command = "LC_ALL=C sha256sum a*.bin b.json | sha256sum"
    result = subprocess.run(["sh", "-c", command], cwd=tmp_path, capture_output=True, check=True, text=True).stdout
    assert digest.of_files(tmp_path, ["b.json", "a.bin", "a-1.bin"]) == result.split()[0]


def test_of_tokens_is_of_little_endian_words() -> None:
    command = r"printf '\1\0\0\0\0\2\0\0\377\377\377\377' | sha256sum"
    result = subprocess.run(["sh", "-c", command], capture_output=True, check=True, text=True).stdout
    assert digest.of_tokens([1, 512, 2**32 - 1]) == result.split()[0]
    assert digest.of_tokens([]) != digest.of_tokens([0])
