"""Imports transformers without what it imports and nothing here uses.

`transformers.modeling_utils` imports torch's compiler, its distributed tensors and checkpoints, and scipy for a loss:
40 % of the processor time of all imports, and a quarter of their memory. Meanwhile these modules are empty ones, whose
names are decorators that change nothing, functions that load the real ones, or classes without instances. Then they are
removed: who imports them later gets the real ones. docs/decisions/0015-lean-imports.md has the reasons.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

COMPILER = "torch._dynamo"
UNUSED = (
    COMPILER,
    "torch.distributed._composable",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "scipy",
)
"""With the modules inside."""


class _EmptyModules(MetaPathFinder, Loader):
    """Finds an empty module for each of UNUSED that is not imported yet."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if any(name == unused or name.startswith(f"{unused}.") for unused in UNUSED):
            return ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = ModuleType(spec.name)

        def attribute(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            if spec.name == COMPILER:
                return _unchanged
            if spec.name.startswith(COMPILER):
                return partial(_call_real, spec.name, name)
            setattr(module, name, type(name, (), {"__init__": _accept, "__module__": spec.name}))
            return module.__dict__[name]

        module.__dict__["__getattr__"] = attribute
        self.names.append(spec.name)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """It stays empty."""


def _unchanged(function: Callable[..., Any] | None = None, *_: Any, **__: Any) -> Any:
    """A decorator, with or without arguments."""
    return (lambda decorated: decorated) if function is None else function


def _call_real(module: str, name: str, *arguments: Any, **named: Any) -> Any:
    """Call what torch has by this name."""
    return getattr(import_module(module), name)(*arguments, **named)


def _accept(*_: Any, **__: Any) -> None:
    """Whatever an instance is made of."""


@contextmanager
def _without_unused() -> Iterator[None]:
    finder = _EmptyModules()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in finder.names:
            del sys.modules[name]
            package, _, last = name.rpartition(".")
            if package in sys.modules:
                sys.modules[package].__dict__.pop(last, None)


def import_transformers() -> None:
    """For processes that serve, before they import anything that imports transformers."""
    import torch.compiler  # noqa: F401  # first, so that torch itself is whole

    with _without_unused():
        import transformers.generation
        import transformers.modeling_utils

        assert transformers.generation.GenerationMixin  # imported when it is asked for
