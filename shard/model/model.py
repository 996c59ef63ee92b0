"""The model as the engine sees it: fill `inputs`, call `forward`, get one row of logits per wanted token.

Runs transformers' own code on one flat row of T tokens; KV lives in pages that the attention backend owns.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn

from lorikeet.shard.attention import AttentionBackend
from lorikeet.shard.batch.inputs import RankDesync, Segment, StepInputs
from lorikeet.shard.batch.padding import Bounds, Padding
from lorikeet.shard.model.adapters.discovery import Target
from lorikeet.shard.model.graphs import Graphs, Recorder
from lorikeet.shard.model.lora.targets import LoraTarget
from lorikeet.shard.model.medusa.heads import HeadsPool
from lorikeet.shard.model.site import AttentionBinding

if TYPE_CHECKING:
    from lorikeet.shard.model.adapters.tables import DeviceKernels


@dataclass(frozen=True)
class ModelInfo:
    """What others may know about a loaded model."""

    model_type: str
    vocab_size: int
    """Rows of the output head."""
    max_positions: int | None
    dtype: torch.dtype
    device: torch.device
    num_layers: int
    num_parameters: int
    quantization: str = ""
    """What the weights are quantised by, "" for not at all."""


class PeerRanks(Protocol):
    """The other ranks of a model that is split over several, as the first one meets them."""

    def step(self, inputs: StepInputs) -> None:
        """Compute along what `inputs` describes."""

    def allocate_kv(self, num_pages: int) -> None:
        """Have so many pages."""

    def free_kv(self) -> None:
        """Have no pages."""

    def capture(self, padding: Padding, bounds: Sequence[Bounds], is_checked: bool) -> None:
        """Capture the same steps."""


class Model:
    """A loaded base model with paged KV."""

    def __init__(
        self,
        network: nn.Module,
        backend: AttentionBackend,
        inputs: StepInputs,
        info: ModelInfo,
        lora_targets: Mapping[str, Target],
        join: Callable[[], None] = lambda: None,
    ) -> None:
        """`join` lets modules that are cut into parts give what the whole ones would."""
        self.network = network
        self.backend = backend
        self.info = info
        self.page_size = backend.page_size
        self.inputs = inputs
        self.lora_targets = lora_targets
        """Where adapters can change the network, by module name."""
        self.heads = HeadsPool(inputs)
        output = next((site for site in lora_targets.values() if isinstance(site, LoraTarget) and site.is_head), None)
        if output is not None:
            self.heads.attach(network, output)
        join()
        self.others: PeerRanks | None = None
        """Who computes along, once they listen."""
        self.graphs: Graphs | None = None
        """Padded steps as they were captured, once they are."""
        self.targets = [module for module in network.modules() if isinstance(module, AttentionBinding)]
        self._trace_attention_shapes()

    @property
    def page_bytes(self) -> int:
        """Bytes of K and V per page, over all layers."""
        return sum(self.backend.page_bytes(site.spec, self.info.dtype) for site in self.targets if site.spec)

    def allocate_kv(self, num_pages: int) -> None:
        """Reserve KV memory for `num_pages` pages in every layer, dropping what was there, graphs too."""
        self.free_kv()
        if self.others is not None:
            self.others.allocate_kv(num_pages)
        for site in self.targets:
            assert site.spec is not None
            site.kv = self.backend.allocate(site.spec, num_pages, self.info.dtype, self.info.device)

    def free_kv(self) -> None:
        """Have no pages, and no graphs that would read them."""
        if self.others is not None:
            self.others.free_kv()
        self.drop_graphs()
        for site in self.targets:
            site.kv = None

    def allocate_adapters(self, num_slots: int) -> None:
        """Room for so many adapters in a step, dropping what was there."""
        for site in self.lora_targets.values():
            site.allocate(num_slots)

    def enable_device_kernels(self, num_slots: int, max_rows: int, max_drafts: int) -> "DeviceKernels":
        """Let kernels of the device compute adapters and heads, for steps of up to `max_rows` rows whose logits or
        tokens are wanted, and `max_drafts` rows of guesses. Needs triton. Raises ValueError where the file of their
        configurations is not right.
        """
        from lorikeet.shard.model.adapters.tables import DeviceKernels, targets_of
        from lorikeet.shard.model.kernels import tuning
        from lorikeet.shard.model.medusa.cuda import DeviceHeads

        tuned = tuning.read(self.info.device)
        self.inputs.reserve_groups(max_rows, num_slots, max_drafts)
        self.heads.kernels = DeviceHeads(self.inputs, num_slots, tuned)
        return DeviceKernels(targets_of(self.lora_targets), num_slots, self.info.device, tuned)

    @property
    def graphs_unsupported_reason(self) -> str:
        """What of its forward pass cannot be captured; empty where nothing is known."""
        return "" if self.backend.can_capture else "its attention goes from request to request on the host"

    def capture(self, padding: Padding, recorder: Recorder, bounds: Sequence[Bounds], is_checked: bool = False) -> None:
        """Compute steps of these bounds of `padding` by graphs from now on, captured here and, where they are to be
        checked, compared to what the same launches give one by one. The spare page must be there.

        Raises CannotCapture. Ranks that compute together capture together.
        """
        if self.others is not None:
            self.others.capture(padding, bounds, is_checked)
        self.graphs = None
        self.inputs.pad(padding)
        try:
            with torch.inference_mode():
                self.graphs = Graphs(self, padding, recorder, bounds)
                if is_checked:
                    self.graphs.check()
        except Exception:
            self.drop_graphs()
            raise

    def drop_graphs(self) -> None:
        """Compute steps as they come again."""
        self.graphs = None
        self.inputs.pad(None)

    @torch.inference_mode()
    def forward(self) -> torch.Tensor:
        """Logits of `inputs.logits_rows`, then those of the heads that `inputs.heads` wants: [S + E, V] float32. Good
        until the next call.
        """
        if self.others is None:
            return self._forward()
        self.others.step(self.inputs)
        try:
            return self._forward()
        except Exception as error:
            raise RankDesync(f"a step failed on one of several ranks: {type(error).__name__}: {error}") from error

    def _forward(self) -> torch.Tensor:
        inputs = self.inputs
        self.backend.prepare(inputs)
        self.heads.prepare()
        if inputs.bounds is None:
            return self.compute()[: inputs.num_logits].float()
        # [T + E, V]
        logits = self.compute().float() if self.graphs is None else self.graphs.replay(inputs.bounds)
        drafts = logits[inputs.bounds.num_rows :][: inputs.num_drafts]
        logits = logits[: inputs.num_wanted]
        return torch.cat([logits, drafts]) if inputs.num_drafts else logits

    def compute(self) -> torch.Tensor:
        """What the network makes of `inputs` after `backend.prepare`: rows of logits in the network's dtype, [S + E, V]
        or one row more; of a padded step [T + E, V].
        """
        inputs = self.inputs
        input_ids, position_ids, rows = inputs.input_ids, inputs.position_ids, inputs.logits_rows
        if inputs.device.type == "cpu":
            input_ids, position_ids, rows = (_at_least_two(tensor) for tensor in (input_ids, position_ids, rows))
        output = self.network(
            input_ids=input_ids[None], position_ids=position_ids[None], use_cache=False, logits_to_keep=rows
        )
        logits: torch.Tensor = output.logits[0]
        if logits.shape[0] < inputs.num_logits:
            raise RuntimeError("heads are to guess, and the network does not take its logits from its output head")
        return logits

    def _trace_attention_shapes(self) -> None:
        """Run two tokens without KV, so that every site learns its layer's shape; a site never called is dropped."""
        row = torch.zeros(2, dtype=torch.long, device=self.info.device)
        self.inputs.fill([Segment(0, 2, range(1))], row, row[:1])
        self.forward()
        self.targets = [site for site in self.targets if site.spec is not None]
        if any(site.num_calls != 1 for site in self.targets) or len(self.targets) != self.info.num_layers:
            raise ValueError(f"{self.info.model_type}: its layers do not call one attention function once each")


def _at_least_two(values: torch.Tensor) -> torch.Tensor:
    """values: [n]. One value is doubled: matrix products give equal bits for any number of rows from two on."""
    return values.expand(2) if values.shape[0] == 1 else values
