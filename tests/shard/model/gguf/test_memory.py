"""The memory that loading a `.gguf` file takes, next to what stays."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests import tiny
from tests.shard.model.gguf.files import answer_of, write_model

pytest.importorskip("gguf")
WIDE = {
    "vocab_size": 40_000, "hidden_size": 512, "intermediate_size": 4096, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
MEASURE = """
import gc, json, sys
from pathlib import Path
from lorikeet.shard.config import ShardConfig
from lorikeet.shard.model import load_model

def memory(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key + ":"))

def load(folder):
    return load_model(ShardConfig("m", folder, "unix:/dev/null", dtype=sys.argv[3], max_total_tokens=128))

load(sys.argv[1])  # imports and compiled code are no part of a model
gc.collect()
before = memory("VmRSS")
Path("/proc/self/clear_refs").write_text("5")  # the peak is now
model = load(sys.argv[2])
gc.collect()
print(json.dumps([memory("VmHWM") - before, memory("VmRSS") - before]))
"""


def assert_streamed(folder: Path, dtype: str, small: Path) -> None:
    """Loading the file of a folder takes at most 1.3 times what stays. `small`: a folder that is loaded
    first."""
    command = [sys.executable, "-c", MEASURE, str(small), str(folder), dtype]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    peak, rest = json.loads(done.stdout.splitlines()[-1])
    assert rest > 20_000 and peak <= 1.3 * rest, (peak, rest)


def made(folder: Path, kind: str = "Q8_0", **values: int) -> Path:
    """The folder made for a file of a model of these sizes, whose head is tied."""
    plain = tiny.make("llama", folder / "plain", tokenizer=True, tie_word_embeddings=True, **values)
    write_model(plain, folder / "tiny.gguf", kind, token_embd_weight="Q8_0")
    assert "error" not in answer_of(folder / "tiny.gguf", folder / "made", needs_tokenizer=False)
    return folder / "made"


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("kind", ["Q4_K", "Q5_0", "IQ2_XS", "F16"])
def test_loading_takes_little_more_than_what_stays(kind: str, tmp_path: Path) -> None:
    # plain tensors run other code, whose imports the small model must load as well
    small = made(tmp_path / "small", "F16" if kind == "F16" else "Q8_0")
    assert_streamed(made(tmp_path / "large", kind, **WIDE), "bfloat16", small)
