"""The table of all flags. The parser, `--help`, variables, docs/launcher.md and the fields of the processes'
configurations are derived from it.

A row says what the flag does, or why it has no effect, or why it is rejected.
"""

from lorikeet.launcher.config.flag import Flag
from lorikeet.launcher.config.flags import adapters, machine, model, speculation

GROUPS: dict[str, tuple[Flag, ...]] = {**model.GROUPS, **speculation.GROUPS, **adapters.GROUPS, **machine.GROUPS}

FLAGS: dict[str, Flag] = {flag.name: flag for group in GROUPS.values() for flag in group}

FORMER_NAMES: dict[str, str] = {flag.formerly: name for name, flag in FLAGS.items() if flag.formerly}
"""Deprecated names of flags, and the names of today."""

MOST_USED = (
    *("model-id", "port", "hostname", "local-adapter-root", "adapters", "adapter-id", "speculative-tokens"),
    *("speculative-method", "draft-model-id", "max-total-tokens", "max-concurrent-requests", "dtype", "quantize"),
    *("device", "num-shard", "replicas", "api-keys", "json-output", "config", "print-config"),
)
"""Flags that `--help` shows first."""
