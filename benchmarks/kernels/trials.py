"""Trials of one configuration of a kernel: launches over the steps of one module, compared with plain torch."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.kernels.lora import Case, Size
from lorikeet.shard.batch.inputs import HeadsRow, StepInputs
from lorikeet.shard.batch.segments import Segment
from lorikeet.shard.model.kernels.tuning import Tuned
from lorikeet.shard.model.medusa.cuda import DeviceHeads
from lorikeet.shard.model.medusa.heads import HeadsContent, HeadsShape, SlotHeads

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2**-6, torch.float16: 2**-8}
"""Tolerance as a share of the largest value."""
NUM_HEADS = 3
MAX_REQUESTS = 32
"""Requests, and adapters, of a step; more tokens are more of each."""


@dataclass(frozen=True)
class Trial:
    """One kernel over one step."""

    key: tuple[str, int, torch.dtype]
    """Whose configuration is tried, as `Tuned` names it."""
    what: str
    launch: Callable[[], torch.Tensor]
    """Computes the step and returns what it gave."""
    wanted: torch.Tensor
    """What the specification gives, in float32."""

    def is_right(self) -> bool:
        difference = (self.launch().float() - self.wanted).abs().max()
        return bool(difference <= TOLERANCE[self.key[2]] * self.wanted.abs().max())  # and False for what is no number


def of_adapters(
    key: tuple[str, int, torch.dtype], shape: tuple[int, int], rank: int, num_tokens: int, tuned: Tuned,
    device: torch.device,
) -> Trial:  # fmt: skip
    """Both kernels for adapters, of a mix in which few adapters have most rows. shape: inputs and outputs."""
    num_requests = min(num_tokens, MAX_REQUESTS)
    size = Size(*shape, rank, num_requests, num_tokens // num_requests)
    case = Case(size, "zipf", device, key[2], tuned)
    expected = case.y.clone()
    case.by_row(expected)
    y = torch.empty_like(case.y)

    def launch() -> torch.Tensor:
        y.copy_(case.y)
        case.kernels(y)
        return y

    return Trial(key, f"rank {rank}, {num_tokens} tokens", launch, expected.float())


class HeadsStep:
    """Rows that heads of some slots draft from."""

    def __init__(
        self, shape: HeadsShape, num_rows: int, dtype: torch.dtype, tuned: Tuned, device: torch.device
    ) -> None:
        generator = torch.Generator(device).manual_seed(0)
        self.num_rows, self.shape = num_rows, shape
        num_slots = max(1, num_rows // 2)
        self.inputs = StepInputs(16, device)
        self.inputs.reserve_groups(num_rows, num_slots, num_rows * shape.num_heads)
        self.kernels = DeviceHeads(self.inputs, num_slots, tuned)
        self.slots: list[SlotHeads] = []
        content = HeadsContent(shape, dtype, 0, torch.empty(0, dtype=torch.uint8))
        for slot in range(num_slots):
            num_bytes = sum(-(-torch.Size(size).numel() * dtype.itemsize // 64) * 64 for size in shape.tensors())
            values = torch.randn(num_bytes // dtype.itemsize, generator=generator, device=device)
            heads = content.on(values.div_(shape.hidden_size**0.5).to(dtype).view(torch.uint8))
            self.kernels.bind(slot, heads)
            self.slots.append(heads)
        self.x = torch.randn(num_rows, shape.hidden_size, generator=generator, device=device).to(dtype)
        segments = [Segment(0, 1, range(1)) for _ in range(num_rows)]
        ids = torch.arange(num_rows, device=device)
        heads_rows = [HeadsRow(row, row % num_slots, shape.num_heads) for row in range(num_rows)]
        self.inputs.fill(segments, ids, ids, list(range(num_rows)), heads_rows)

    def drafts(self) -> torch.Tensor:
        """[E, H] by the specification."""
        rows = [self.slots[row % len(self.slots)].hidden(self.x[row : row + 1])[0] for row in range(self.num_rows)]
        return torch.cat(rows)


def of_drafts(key: tuple[str, int, torch.dtype], num_rows: int, tuned: Tuned, device: torch.device) -> Trial:
    """One block of the heads of `num_rows` rows."""
    _, size, dtype = key
    step = HeadsStep(HeadsShape(NUM_HEADS, 1, size, 0), num_rows, dtype, tuned, device)

    def launch() -> torch.Tensor:
        return step.kernels.draft(step.x)[num_rows:]

    return Trial(key, f"{num_rows} rows", launch, step.drafts().float())


def of_answers(
    key: tuple[str, int, torch.dtype], vocab_size: int, num_rows: int, tuned: Tuned, device: torch.device
) -> Trial:
    """Output matrices of one head for `num_rows` rows."""
    _, size, dtype = key
    step = HeadsStep(HeadsShape(1, 0, size, vocab_size), num_rows, dtype, tuned, device)
    x = torch.cat([step.x, step.x])
    logits = torch.zeros(2 * num_rows, vocab_size, dtype=dtype, device=device)

    def launch() -> torch.Tensor:
        step.kernels.put_logits(x, logits)
        return logits[num_rows:]

    rows = [step.slots[row % len(step.slots)].outputs[0](step.x[row : row + 1]) for row in range(num_rows)]
    return Trial(key, f"{num_rows} rows", launch, torch.cat(rows).float())
