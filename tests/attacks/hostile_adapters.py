"""Local adapters that attacks and canaries name."""

import io
import json
import os
import pickle
import shutil
import zipfile
from collections.abc import Iterable
from pathlib import Path

from tests.e2e.launched import ROOT

SOURCE = ROOT / "demo" / "adapters" / "record"
CONFIGURATION, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MIB = 1 << 20
NUM_FRESH = 40
NUM_BOMBS = 16
NUM_CANARIES = 10
"""Adapters that one canary loads."""
BAD_NUMBERS = ("1" + "0" * 400, "-1" + "0" * 400, "9" * 5000, "1e400", "NaN", "Infinity")
"""`lora_alpha` of hostile configurations."""
MAGIC = 0x1950A86A20F9469CFC6C
"""The first value in torch's older files."""
LOOP = "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}" + 3 * "{% endfor %}"


def write_adapter(folder: Path, lora_alpha: str = "", same_as: Path | None = None) -> None:
    """An adapter in a new folder. One with a `lora_alpha` of its own is another adapter for the server. With `same_as`,
    it links to the weights of the one in that folder.
    """
    folder.mkdir(parents=True)
    if same_as is None:
        shutil.copy(SOURCE / WEIGHTS, folder)
    else:
        os.link(same_as / WEIGHTS, folder / WEIGHTS)
    values = json.loads((SOURCE / CONFIGURATION).read_text())
    text = json.dumps(values | ({"lora_alpha": "ALPHA"} if lora_alpha else {}))
    (folder / CONFIGURATION).write_text(text.replace('"ALPHA"', lora_alpha))


def write_adapters(roots: Path, canaries: Iterable[str]) -> None:
    """The adapters that attacks name, and NUM_CANARIES for each name of a canary."""
    first = roots / "public"
    write_adapter(first)
    for name in ("large", "loop", *(f"fresh-{number}" for number in range(NUM_FRESH))):
        write_adapter(roots / name, same_as=first)
    for number, value in enumerate(BAD_NUMBERS):
        write_adapter(roots / f"number-{number}", value, first)
    values = (dict.fromkeys(range(1_000_000)), [_Zeros(1 << 33)])
    bombs = [_saved(value, is_zip) for value in values for is_zip in (False, True)]
    for number in range(NUM_BOMBS):
        (roots / f"bomb-{number}").mkdir()
        shutil.copy(SOURCE / CONFIGURATION, roots / f"bomb-{number}")
        (roots / f"bomb-{number}" / "adapter_model.bin").write_bytes(bombs[number % len(bombs)])
    names = (f"canary-{name}-{number}" for name in canaries for number in range(NUM_CANARIES))
    for alpha, name in enumerate(names, start=1):
        write_adapter(roots / name, str(alpha), first)
    entries = ",".join([f'"{number}":0' for number in range(2 * MIB)])
    (roots / "large" / "tokenizer_config.json").write_text("{" + entries + "}")
    (roots / "loop" / "tokenizer_config.json").write_text(json.dumps({"chat_template": LOOP}))


class _Zeros:
    """So many bytes once it is unpickled."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes

    def __reduce__(self) -> tuple[type, tuple[int]]:
        return bytearray, (self.num_bytes,)


def _saved(value: object, is_zip: bool) -> bytes:
    """A file as torch.save writes it, in its newer or its older format, without tensors."""
    file = io.BytesIO()
    if is_zip:
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("archive/data.pkl", pickle.dumps(value, 2))
            archive.writestr("archive/version", "3\n")
    else:
        for part in (MAGIC, 1001, {"protocol_version": 1001, "little_endian": True, "type_sizes": {}}, value, []):
            pickle.dump(part, file, 2)
    return file.getvalue()
