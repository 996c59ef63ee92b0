"""Transformers without torch's compiler and distributed tensors: what is not imported, what works, what comes back."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests import tiny

IMPORT = """
import json, sys
from lorikeet.proto.lean_imports import UNUSED, import_transformers
import_transformers()
import transformers.modeling_utils
"""


def run(code: str, *arguments: str) -> "object":
    command = [sys.executable, "-c", IMPORT + code, *arguments]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()[-1])


def test_the_unused_parts_of_torch_are_not_imported_by_what_shards_import_either() -> None:
    code = """
import lorikeet.shard.startup.serve
print(json.dumps([n for n in sys.modules if n.startswith(UNUSED)]))
"""
    assert run(code) == []


def test_who_needs_them_later_gets_those_of_torch() -> None:
    code = """
import torch
from torch.distributed.tensor import DTensor
compiled = torch.compile(lambda x: 2 * x, backend="eager")
ok = DTensor.__mro__[1] is torch.Tensor and torch._dynamo.__file__ and bool((compiled(torch.ones(3)) == 2).all())
print(json.dumps(bool(ok)))
"""
    assert run(code) is True


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_a_model_gives_the_logits_that_it_gives_with_everything_imported(name: str, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    folder = str(tiny.make(name, tmp_path / "base"))
    code = """
import torch
from transformers import AutoModelForCausalLM
network = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
with torch.inference_mode():
    logits = network(torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])).logits
ids = network.generate(torch.tensor([[3, 1, 4]]), max_new_tokens=8, do_sample=False)
print(json.dumps([logits.flatten().tolist(), ids.tolist()]))
"""
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        logits = network(torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])).logits
    ids = network.generate(torch.tensor([[3, 1, 4]]), max_new_tokens=8, do_sample=False)
    assert run(code, folder) == [logits.flatten().tolist(), ids.tolist()]
