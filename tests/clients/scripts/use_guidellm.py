"""GuideLLM: a minute of streamed chats, none of which fails."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

CLIENTS, SECONDS = 4, 60

with tempfile.TemporaryDirectory() as folder:
    report = Path(folder, "report.json")
    backend = {
        "kind": "openai_http",
        "target": os.environ["URL"],
        "model": os.environ["MODEL"],
        "api_key": os.environ["KEY"],
        "request_format": "/v1/chat/completions",
    }
    options = {
        "backend": backend,
        "profile": {"kind": "concurrent", "streams": CLIENTS},
        "constraint": {"kind": "max_duration", "seconds": SECONDS},
        "tokenizer": {"kind": "huggingface_auto", "model": os.environ["BASE"]},
        "data": {"kind": "synthetic_text", "prompt_tokens": 64, "output_tokens": 32},
        "output": {"kind": "json", "path": str(report)},
    }
    arguments = [part for name, value in options.items() for part in (f"--{name}", json.dumps(value))]
    command = [str(Path(sys.executable).with_name("guidellm")), "run", "--disable-console-interactive", *arguments]
    subprocess.run(command, check=True)
    [found] = json.loads(report.read_text())["benchmarks"]
totals = found["metrics"]["request_totals"]
assert totals["successful"] >= CLIENTS and not totals["errored"], totals
print("guidellm", totals["successful"], "requests")
