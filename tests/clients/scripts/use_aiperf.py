"""aiperf: a minute of streamed chats, none of which fails."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

CLIENTS, SECONDS = 4, 60

with tempfile.TemporaryDirectory() as folder:
    flags = {
        "model": os.environ["MODEL"],
        "url": os.environ["URL"],
        "api-key": os.environ["KEY"],
        "tokenizer": os.environ["BASE"],
        "endpoint-type": "chat",
        "concurrency": CLIENTS,
        "benchmark-duration": SECONDS,
        "isl": 64,
        "osl": 32,
        "random-seed": 1,
        "ui": "none",
        "output-artifact-dir": folder,
    }
    arguments = [part for name, value in flags.items() for part in (f"--{name}", str(value))]
    command = [str(Path(sys.executable).with_name("aiperf")), "profile", "--streaming", *arguments]
    offline = {"HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"}  # with them it takes no tokenizer from a folder
    variables = {name: value for name, value in os.environ.items() if name not in offline}
    subprocess.run(command, check=True, env=variables)
    found = json.loads(Path(folder, "profile_export_aiperf.json").read_text())
assert found["request_count"]["avg"] >= CLIENTS, found
assert not found["error_summary"], found["error_summary"]
assert not (found.get("error_request_count") or {}).get("avg"), found
assert found["time_to_first_token"]["avg"] > 0 and found["inter_token_latency"]["avg"] > 0
print("aiperf", found["request_count"]["avg"], "requests")
