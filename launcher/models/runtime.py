"""What this server runs on, in words: versions, processor, memory, graphics driver."""

import os
import platform
import subprocess

from lorikeet.launcher.models import devices
from lorikeet.proto.version import version


def description() -> str:
    """What `--env` prints."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    lines = [
        "runtime environment:",
        f"  lorikeet: {version()}",
        f"  python: {platform.python_version()}",
        f"  platform: {platform.platform()}",
        f"  cores: {len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()}",
        f"  memory: {memory / 2**30:.1f} GiB",
        f"  torch: {devices.torch_version()}",
        f"  nvidia-smi: {_nvidia_smi()}",
    ]
    return "\n".join(lines)


def _nvidia_smi() -> str:
    try:
        result = subprocess.run(
            ["nvidia-smi"], capture_output=True, text=True, timeout=20, check=True, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.SubprocessError):
        return "not found"
    return "\n" + result.stdout
