"""The plainest way to read and check adapters: the time that loading them is held against.

One process, one thread, one folder after the other, the base's skeleton made beforehand: read both files, have PEFT
put the adapter into the skeleton and load its tensors by its own conversion (a missing or unknown tensor or another
shape ends it), look at every number for NaN and infinity, take the adapter out again. Nothing is cast, stacked, written
or copied anywhere. Prints seconds, without those of the first folder, which PEFT needs to load itself.

    python -m benchmarks.plain_reading BASE FOLDER …
"""

import json
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import peft
import torch
from safetensors.torch import load
from transformers import AutoConfig, AutoModelForCausalLM


def read_all(base: Path, folders: Sequence[Path]) -> float:
    """Seconds for all folders; the first is read once more before."""
    torch.set_num_threads(1)
    values = AutoConfig.from_pretrained(base)
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT's own
        network: Any = AutoModelForCausalLM.from_config(values)
        holder = peft.get_peft_model(network, peft.LoraConfig(r=1, target_modules=["q_proj"]), low_cpu_mem_usage=True)
        _read(holder, folders[0])
        start = time.perf_counter()
        for folder in folders:
            _read(holder, folder)
        return time.perf_counter() - start


def _read(holder: Any, folder: Path) -> None:
    """Put one adapter in and take it out."""
    config = peft.LoraConfig.from_pretrained(str(folder))
    tensors = load((folder / "adapter_model.safetensors").read_bytes())
    if not all(bool(tensor.isfinite().all()) for tensor in tensors.values()):
        raise ValueError(f"{folder} holds numbers that are not finite")
    holder.add_adapter("read", config, low_cpu_mem_usage=True)
    told = peft.set_peft_model_state_dict(holder, tensors, adapter_name="read", low_cpu_mem_usage=True)
    if told.unexpected_keys or any("read" in key for key in told.missing_keys):
        raise ValueError(f"{folder} does not fit its base")
    holder.delete_adapter("read")


if __name__ == "__main__":
    seconds = read_all(Path(sys.argv[1]), [Path(name) for name in sys.argv[2:]])
    print(json.dumps({"adapters": len(sys.argv) - 2, "seconds": round(seconds, 4)}))
