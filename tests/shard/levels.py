"""Kernels compiled for processors with fewer instructions, so that their tests run the code of those processors too."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest

from lorikeet.shard.system import native, prebuilt

OWN = "own"
LEVELS = (OWN, "x86-64-v3", "x86-64-v2")


@contextmanager
def compiled_for(level: str, module: ModuleType, *cached: Callable[..., Any]) -> Iterator[None]:
    """Within the block `module` loads kernels of `level`; `cached` are its functions that keep what they loaded. Skips
    the test where the processor is not of that level, or of no better one.
    """
    if level == OWN:
        yield
        return
    own = {each.name: each for each in prebuilt.own_levels() if not each.only}
    if level not in own or level == next(iter(own)):
        pytest.skip(f"this processor's level is {next(iter(own), 'none')}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "FLAGS", (*prebuilt.COMMON_FLAGS, *own[level].flags, "-mtune=generic"))
        patch.setattr(module, "library", native.library.__wrapped__)
        for function in cached:
            function.cache_clear()  # type: ignore[attr-defined]
        yield
    for function in cached:
        function.cache_clear()  # type: ignore[attr-defined]
