"""The model: fill `inputs`, call `forward`, get one row of logits per requested token.

Runs transformers' own code, or its modules in compiled calls, on one flat row of T tokens. The attention backend
owns the pages of KV.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import structlog
import torch
from torch import nn

from lorikeet.proto.pooling import PooledModel
from lorikeet.shard.attention import AttentionBackend, AttentionSpec, LayerKV
from lorikeet.shard.batch.inputs import HeadsRow, RankDesync, StepInputs
from lorikeet.shard.batch.padding import Bounds, Padding
from lorikeet.shard.batch.segments import Segment
from lorikeet.shard.model.adapters.added_tokens import AddedTokens
from lorikeet.shard.model.adapters.discovery import Target
from lorikeet.shard.model.attention_binding import AttentionBinding
from lorikeet.shard.model.fusion.compiled import CompiledNetwork, compile_network
from lorikeet.shard.model.fusion.layer import FusedDecoderLayer
from lorikeet.shard.model.graphs import Agree, Graphs, Recorder
from lorikeet.shard.model.lora.targets import ComposedSlots, LoraTarget
from lorikeet.shard.model.medusa.heads import HeadsPool

if TYPE_CHECKING:
    from lorikeet.shard.model.adapters.tables import DeviceKernels

log = structlog.get_logger()


@dataclass(frozen=True)
class ModelInfo:
    """Facts about a loaded model."""

    model_type: str
    vocab_size: int
    """Rows of the output head."""
    dtype: torch.dtype
    device: torch.device
    num_layers: int
    num_parameters: int
    quantization: str = ""
    """The method that the weights are quantised by, "" for none."""
    pooled: PooledModel | None = None
    """How prompts become vectors or scores, of a model that generates no text."""
    num_extra: int = 0
    """The last rows of the output head, for tokens that adapters add."""
    rotary_factors: str = ""
    """`long` or `short`: the factors of longrope in use; "" for other models."""


class PeerRanks(Protocol):
    """The other ranks of a model that is split over several, for the first one. `Leader` implements it, whose module
    imports this folder.
    """

    def step(self, inputs: StepInputs) -> None:
        """Compute the step that `inputs` describes too."""

    def allocate_kv(self, num_pages: int) -> None:
        """Allocate this many pages."""

    def free_kv(self) -> None:
        """Free all pages."""

    def begin_memory(self) -> None:
        """Measure the memory of the steps from here on."""

    def least_memory(self, num_bytes: int, spare: int) -> int:
        """The least of `num_bytes` and of what every other rank has left for KV, with `spare` bytes free."""

    def capture(self, padding: Padding, bounds: Sequence[Bounds], is_checked: bool) -> None:
        """Capture the same steps."""

    def agree(self, reason: str) -> str:
        """The first rank's reason that is not empty; every rank calls this at the same time."""


class Model:
    """A loaded base model with paged KV."""

    def __init__(
        self,
        network: nn.Module,
        backend: AttentionBackend,
        inputs: StepInputs,
        info: ModelInfo,
        lora_targets: Mapping[str, Target],
        connect_ranks: Callable[[], None] = lambda: None,
        shares_kv: bool = False,
    ) -> None:
        """`connect_ranks` adds the sums over ranks to partitioned modules. `shares_kv`: whether no layer's K and V are
        read after its step, so that all layers use the same pages.
        """
        self.network = network
        self.backend = backend
        self.info = info
        self.page_size = backend.page_size
        self.inputs = inputs
        inputs.num_attention_numbers = backend.num_numbers
        self.lora_targets = lora_targets
        self.composed_slots = ComposedSlots(0, 0)
        """The modules that adapters can change, by name."""
        self.added_tokens = AddedTokens(info.vocab_size - info.num_extra)
        self.heads = HeadsPool(inputs)
        for target in lora_targets.values():
            if isinstance(target, LoraTarget) and target.is_head:
                self.heads.attach(network, target)
        connect_ranks()
        self.others: PeerRanks | None = None
        """The other ranks, once they are connected."""
        self._kernels: DeviceKernels | None = None
        """Kernels that compute adapters on a device."""
        self.graphs: Graphs | None = None
        """The captured steps, if any."""
        self.bindings = [module for module in network.modules() if isinstance(module, AttentionBinding)]
        self.shares_kv = shares_kv
        self.result_size = 0
        """Columns of what `forward` returns."""
        self.compiled: CompiledNetwork | None = None
        """Computes what the network computes, in fewer calls."""
        self._trace_attention_shapes()
        self._compile()

    @property
    def page_bytes(self) -> int:
        """Bytes of K and V per page, over all layers."""
        return sum(self.backend.page_bytes(spec, self.info.dtype) for spec in self._kv_specs())

    def _kv_specs(self) -> list[AttentionSpec]:
        """KV specs of the layers with K and V of their own: of each, or of the first of each kind."""
        specs = [binding.spec for binding in self.bindings if binding.spec is not None]
        return list(dict.fromkeys(specs)) if self.shares_kv else specs

    def allocate_kv(self, num_pages: int) -> None:
        """Reserve KV memory for `num_pages` pages in every layer, dropping earlier pages and graphs."""
        self.free_kv()
        if self.others is not None:
            self.others.allocate_kv(num_pages)
        shared: dict[AttentionSpec, LayerKV] = {}
        for binding in self.bindings:
            assert binding.spec is not None
            binding.kv = shared.get(binding.spec) if self.shares_kv else None
            if binding.kv is None:
                binding.kv = self.backend.allocate(binding.spec, num_pages, self.info.dtype, self.info.device)
            if self.shares_kv:
                shared[binding.spec] = binding.kv

    def free_kv(self) -> None:
        """Free all pages, and the graphs that read them."""
        if self.others is not None:
            self.others.free_kv()
        self.drop_graphs()
        for binding in self.bindings:
            binding.kv = None

    def allocate_adapters(self, num_slots: int, num_sums: int = 0) -> None:
        """Allocate slots for adapters, and behind them for sums of adapters, dropping earlier ones."""
        self.composed_slots = ComposedSlots(num_slots, num_sums)
        for binding in self.lora_targets.values():
            binding.allocate(num_slots, self.composed_slots)

    def enable_device_kernels(
        self, num_slots: int, max_rows: int, max_drafts: int, num_sums: int = 0
    ) -> "DeviceKernels":
        """Compute adapters and heads by kernels of the device, for up to `max_rows` rows and `max_drafts` draft rows of
        a step. Needs triton. Raises ValueError for an invalid file of kernel configurations.
        """
        from lorikeet.shard.model.adapters.tables import DeviceKernels, targets_of
        from lorikeet.shard.model.kernels import tuning
        from lorikeet.shard.model.medusa.cuda import DeviceHeads

        tuned = tuning.read(self.info.device)
        self.inputs.reserve_groups(max_rows, num_slots + num_sums, max_drafts, num_sums)
        self.heads.kernels = DeviceHeads(self.inputs, num_slots, tuned)
        targets, device = targets_of(self.lora_targets), self.info.device
        self._kernels = DeviceKernels(targets, num_slots, device, tuned, num_sums)
        self.added_tokens.place(num_slots + num_sums, device)
        return self._kernels

    @torch.inference_mode()
    def warm_up_adapters(self) -> None:
        """Compile the kernels of adapters and heads, which would otherwise happen in the step of the first adapter:
        compute a token with an empty slot, and one with an empty sum. All ranks do so together.
        """
        if self._kernels is None or self.heads.kernels is None:
            return
        inputs = self.inputs
        slots = [0] if not self.composed_slots.num_sums else [0, self.composed_slots.num_slots]
        ids = torch.zeros(len(slots), dtype=torch.long, device=self.info.device)
        heads = [HeadsRow(0, 0, 1)] if self.heads.vocab_size else []
        rows = list(range(len(slots)))
        segments = [Segment(0, 1, range(1), slot=slot) for slot in slots]
        inputs.fill(segments, ids, torch.tensor(rows, device=self.info.device), rows, heads)
        self.backend.prepare(inputs)
        inputs.send()
        with self._kernels.assumed_changed(0), self.heads.kernels.assumed_outputs():
            self.compute()

    @property
    def graphs_unsupported_reason(self) -> str:
        """Why its forward pass cannot be captured; empty where no reason is known."""
        return "" if self.backend.can_capture else "its attention loops over requests on the host"

    def capture(
        self,
        padding: Padding,
        recorder: Recorder,
        bounds: Sequence[Bounds],
        is_checked: bool = False,
        agree: Agree | None = None,
    ) -> None:
        """Capture steps of these bounds of `padding` as graphs, and replay them from now on; with `is_checked` compare
        them with the launches outside a graph. The spare page must be allocated.

        All ranks capture together, those after the first with `agree`. Raises CannotCapture, on all of them.
        """
        if self.others is not None:
            self.others.capture(padding, bounds, is_checked)
            agree = self.others.agree
        self.graphs = None
        self.inputs.pad(padding)
        try:
            with torch.inference_mode():
                self.graphs = Graphs(self, padding, recorder, bounds, agree)
                if is_checked:
                    self.graphs.check()
        except Exception:
            self.drop_graphs()
            raise

    def drop_graphs(self) -> None:
        """Stop padding steps and replaying graphs."""
        self.graphs = None
        self.inputs.pad(None)

    @torch.inference_mode()
    def forward(self) -> torch.Tensor:
        """Logits of `inputs.logits_rows`, then those of the heads in `inputs.heads`: [S + E, V] float32, valid until
        the next call. If `inputs.is_sampled`, those of rows that the step samples are undefined.
        """
        self.backend.prepare(self.inputs)
        self.inputs.send()
        if self.others is None:
            return self._forward()
        self.others.step(self.inputs)
        try:
            return self._forward()
        except Exception as error:
            raise RankDesync(f"a step failed on one of several ranks: {type(error).__name__}: {error}") from error

    def forward_with_hidden(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits as of `forward`, and the output head's input for `inputs.logits_rows`: [S, H] bfloat16. CPU only."""
        hidden: list[torch.Tensor] = []
        assert self.heads.output is not None
        # before the hook that appends rows of draft tokens
        hook = self.heads.output.register_forward_pre_hook(lambda _, args: hidden.append(args[0]), prepend=True)
        try:
            logits = self.forward()
        finally:
            hook.remove()
        # without the second row of a step of one
        return logits, hidden[0].flatten(0, -2)[: self.inputs.logits_rows.shape[0]].to(torch.bfloat16)

    def _forward(self) -> torch.Tensor:
        inputs = self.inputs
        self.heads.prepare()
        if inputs.bounds is None:
            return self.compute()[: inputs.num_logits].float()
        # [S + E, V] of the bounds
        logits = self.compute().float() if self.graphs is None else self.graphs.replay(inputs.bounds)
        drafts = logits[inputs.bounds.num_wanted :][: inputs.num_drafts]
        logits = logits[: inputs.num_wanted]
        return torch.cat([logits, drafts]) if inputs.num_drafts else logits

    def compute(self) -> torch.Tensor:
        """Run the network after `inputs.send`. Returns logits in its dtype, [S + E, V] or one row more; of a padded
        step those of its bounds.
        """
        inputs = self.inputs
        inputs.put_device_tokens()
        input_ids, position_ids, rows = inputs.input_ids, inputs.position_ids, inputs.logits_rows
        # [1, S + E, V]
        logits = None if self.compiled is None else self.compiled(input_ids[None], position_ids[None], rows)
        if logits is None:
            if inputs.device.type == "cpu":
                input_ids, position_ids, rows = (_at_least_two(tensor) for tensor in (input_ids, position_ids, rows))
            logits = _call(self.network, input_ids[None], position_ids[None], rows)
        logits = logits[0]
        if logits.shape[0] < inputs.num_logits:
            raise RuntimeError("Medusa heads need a model whose logits come from its output head (lm_head)")
        if self.info.num_extra:
            self.added_tokens.exclude(logits, inputs.head_adapter_rows)
        return logits

    def _trace_attention_shapes(self) -> None:
        """Run two tokens without KV: bindings record their layers' shapes; those not called are dropped."""
        row = torch.zeros(2, dtype=torch.long, device=self.info.device)
        self.inputs.fill([Segment(0, 2, range(1))], row, row[:1])
        self.result_size = self.forward().shape[1]
        self.bindings = [binding for binding in self.bindings if binding.spec is not None]
        num_calls = [binding.num_calls for binding in self.bindings]
        # Layers that share their weights are one module, called several times, only where K and V are shared.
        if sum(num_calls) != self.info.num_layers or (max(num_calls) > 1 and not self.shares_kv):
            raise ValueError(f"{self.info.model_type}: its layers do not call the attention function once each")

    def _compile(self) -> None:
        """Call layers as compiled code if they give the bits of their parts, and all of them without the model's code
        if they give the bits of the network.
        """
        layers = [module for module in self.network.modules() if isinstance(module, FusedDecoderLayer)]
        layers = [layer for layer in layers if layer.compiled_layer is not None]
        if not layers:
            return
        self.allocate_kv(1)
        self._call_parts(layers, True)
        expected = self._trial_logits()
        self._call_parts(layers, False)
        if not torch.equal(self._trial_logits(), expected):
            self._call_parts(layers, True)
            self._log_differences("compiled layers give other logits than their parts")
        else:
            self.compiled = compile_network(self.network)
            if self.compiled is not None and not torch.equal(self._trial_logits(), expected):
                self.compiled = None
                self._log_differences("all layers in one compiled call give other logits than the model's own code")
        self.free_kv()

    def _trial_logits(self) -> torch.Tensor:
        """Logits of three tokens together, then of one more alone: [4, V]."""
        ids = torch.arange(1, 5) % self.info.vocab_size
        logits = []
        for start, stop in ((0, 3), (3, 4)):
            self.inputs.fill([Segment(start, stop - start, range(1))], ids[start:stop], torch.arange(stop - start))
            logits.append(self.forward().clone())
        return torch.cat(logits)

    def _call_parts(self, layers: Sequence[FusedDecoderLayer], calls_parts: bool) -> None:
        for layer in layers:
            layer.calls_parts = calls_parts

    def _log_differences(self, reason: str) -> None:
        log.warning("layers_computed_one_by_one", model_type=self.info.model_type, reason=reason)


def _call(network: nn.Module, input_ids: torch.Tensor, position_ids: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """input_ids, position_ids: [1, T]; rows: [S]. Returns [1, S + E, V]."""
    output = network(input_ids=input_ids, position_ids=position_ids, use_cache=False, logits_to_keep=rows)
    logits: torch.Tensor = output.logits
    return logits


def _at_least_two(values: torch.Tensor) -> torch.Tensor:
    """values: [n]. One value is repeated: matrix products give equal bits for any number of rows from two on."""
    return values.expand(2) if values.shape[0] == 1 else values
