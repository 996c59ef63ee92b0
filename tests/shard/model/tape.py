"""What a CUDA graph is, on CPU: every operation of a forward pass is kept with the tensors and numbers that it had, and
replaying computes each again into the memory that its result had. Whatever the pass reads on the host raises an error.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lorikeet.shard.model.graphs import CannotCapture, sentence_of

READS = {"_local_scalar_dense", "nonzero", "item", "is_nonzero", "equal", "masked_select", "unique", "_unique2"}
"""Operations whose result a host waits for, or whose shape hangs on values."""


class Tape(TorchDispatchMode):
    """Keeps the operations that run under it."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[tuple[Any, Any, Any, list[torch.Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in READS:
            raise RuntimeError(f"operation not permitted when stream is capturing: {name}")
        result = func(*args, **(kwargs or {}))
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.kept.append((func, args, kwargs or {}, outputs))
        return result

    def replay(self) -> None:
        """Run everything again."""
        with torch.inference_mode():
            for func, args, kwargs, outputs in self.kept:
                inputs = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves((args, kwargs))
                         if isinstance(leaf, torch.Tensor)}  # fmt: skip
                tensors = [leaf for leaf in tree_leaves(func(*args, **kwargs)) if isinstance(leaf, torch.Tensor)]
                for output, again in zip(outputs, tensors, strict=True):
                    if output.untyped_storage().data_ptr() not in inputs:  # neither a view nor in place
                        output.copy_(again)


class TapeRecorder:
    """In place of CUDA graphs."""

    def __init__(self) -> None:
        self.tapes: list[Tape] = []
        self.num_replayed = 0

    def __call__(self, compute: Callable[[], None]) -> Callable[[], None]:
        """Run `compute` and keep what it did."""
        compute()
        try:
            with Tape() as tape:
                compute()
        except Exception as error:
            raise CannotCapture(sentence_of(error)) from error
        self.tapes.append(tape)

        def replay() -> None:
            self.num_replayed += 1
            tape.replay()

        return replay
