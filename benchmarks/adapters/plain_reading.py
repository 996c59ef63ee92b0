"""The plainest way to read and check adapters: the time that loading them is compared with.

One process, one thread, one folder after the other, on a base without weights made beforehand: read both files, let
PEFT add the adapter and load its tensors by its own conversion (a missing or unknown tensor or another shape raises),
check every number for NaN and infinity, remove the adapter. Nothing is cast, stacked, written or copied. Prints
seconds, without those of a first pass over the first folder, in which PEFT imports what it needs.

    python -m benchmarks.adapters.plain_reading BASE FOLDER …
"""

import json
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import peft
import torch
from safetensors.torch import load
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.evidence import arguments


def read_all(base: Path, folders: Sequence[Path]) -> float:
    """Seconds for all folders; the first is read once before."""
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
    """Add one adapter and remove it."""
    config = peft.LoraConfig.from_pretrained(str(folder))
    tensors = load((folder / "adapter_model.safetensors").read_bytes())
    if not all(bool(tensor.isfinite().all()) for tensor in tensors.values()):
        raise ValueError(f"{folder} holds numbers that are not finite")
    holder.add_adapter("read", config, low_cpu_mem_usage=True)
    result = peft.set_peft_model_state_dict(holder, tensors, adapter_name="read", low_cpu_mem_usage=True)
    if result.unexpected_keys or any("read" in key for key in result.missing_keys):
        raise ValueError(f"{folder} does not fit its base")
    holder.delete_adapter("read")


if __name__ == "__main__":
    parser = arguments.parser(__doc__)
    parser.add_argument("base", type=Path)
    parser.add_argument("folders", type=Path, nargs="+")
    chosen = parser.parse_args()
    seconds = read_all(chosen.base, chosen.folders)
    print(json.dumps({"adapters": len(chosen.folders), "seconds": round(seconds, 4)}))
