"""`python -m lorikeet.shard.model.gguf.folder REQUEST.json`: makes a model folder for a `.gguf` file.

The folder has what other processes read, made from the file's metadata: configuration, tokenizer and chat template; and
a link to the file, or its weights in bfloat16.
"""

import json
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lorikeet.proto.config_file import ConfigFile
from lorikeet.proto.quantization import GGUF_KEY, GGUF_NAME

METADATA = "metadata.gguf"
"""What transformers reads, while the folder is made."""
UNREADABLE = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError, OSError)
"""What transformers raises for metadata that it does not expect."""
DTYPES = {0: "float32", 1: "float16"}
"""By `general.file_type`, the type of most tensors; others have blocks."""


@dataclass(frozen=True)
class FolderRequest(ConfigFile):
    """Which file, and where to write."""

    id: str
    """As the operator gave it."""
    file: str
    folder: str
    """Is created."""
    answer: str
    """Path of the answer: the folder, or an error."""
    needs_tokenizer: bool
    plain: bool = False
    """Write the weights in bfloat16, so that nothing needs the file any more."""


def make_folder(request: FolderRequest) -> None:
    """Raises ValueError with the reason why the file cannot be served."""
    from lorikeet.shard.model.gguf.configuration import check_metadata, complete, read_configuration
    from lorikeet.shard.model.gguf.file import GgufFile, part_paths
    from lorikeet.shard.model.gguf.network import check_gguf
    from lorikeet.shard.model.gguf.tokenizer import ends_of_text, read_tokenizer

    file = GgufFile(request.file)
    check_metadata(file)
    folder = Path(request.folder)
    folder.mkdir()
    for link, path in zip(part_paths(folder / GGUF_NAME, len(file.paths)), file.paths, strict=True):
        link.symlink_to(path.resolve())
    try:
        config = read_configuration(folder, METADATA, file)
        tokenizer = read_tokenizer(folder, METADATA, file, config) if request.needs_tokenizer else None
        complete(config, file)
    except UNREADABLE as failure:
        reason = str(failure).strip().splitlines()[0] if str(failure).strip() else type(failure).__name__
        raise ValueError(f"transformers cannot read its metadata: {reason}") from failure
    finally:
        (folder / METADATA).unlink(missing_ok=True)
    try:
        check_gguf(file, config)
    except NotImplementedError as failure:
        raise ValueError(str(failure)) from failure
    config.dtype = DTYPES.get(file.value("general.file_type"), "bfloat16")
    setattr(config, GGUF_KEY, GGUF_NAME)
    config.save_pretrained(folder)
    ends = {"bos_token_id": file.value("tokenizer.ggml.bos_token_id"), "eos_token_id": ends_of_text(file) or None}
    text = json.dumps({name: value for name, value in ends.items() if value is not None})
    (folder / "generation_config.json").write_text(text)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    if request.plain:
        _write_weights(folder, Path(request.file))


def _write_weights(folder: Path, file: Path) -> None:
    """Replace the link to a file by its weights, dequantised by transformers."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    network: Any = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.bfloat16)
    if hasattr(network.config, "quantization_config"):
        del network.config.quantization_config
    network.hf_quantizer = None
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        network.save_pretrained(scratch)
        (Path(scratch) / "model.safetensors").rename(folder / "model.safetensors")
    (folder / GGUF_NAME).unlink()
    config = json.loads((folder / "config.json").read_text())
    del config[GGUF_KEY]
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}, indent=2))


def main(path: str) -> int:
    """Run the request in the file at `path`."""
    request = FolderRequest.read(path)
    os.environ["TQDM_DISABLE"] = "1"  # a bar would be one endless line of a log
    try:
        make_folder(request)
    except ValueError as reason:
        answer = {"error": f"{request.id} cannot be served: {reason}"}
    else:
        answer = {"id": request.id, "path": request.folder}
    Path(request.answer).write_text(json.dumps(answer))
    return 1 if "error" in answer else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
