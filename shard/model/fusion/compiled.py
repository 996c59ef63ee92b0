"""Decoder layers, and whole networks of them, as one call of compiled code on CPU.

Between the layers of a network runs code of transformers, and before each one the interpreter; together they take a
sixth of a step of one request with 4-bit weights. A network whose layers are all compiled runs without them.
"""

import ctypes
import inspect
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from lorikeet.shard.attention import LayerKV
from lorikeet.shard.batch.row_groups import NO_ADAPTERS
from lorikeet.shard.model.adapters.discovery import PackedLinear
from lorikeet.shard.model.fusion.kernels import CpuKernels, address_of, contiguous, described_norm
from lorikeet.shard.model.fusion.patterns import Norm
from lorikeet.shard.model.fusion.verify import PositionEmbeddings
from lorikeet.shard.model.kernels.cpu import AdapterStep, DecoderLayer, DecoderLayers
from lorikeet.shard.model.lora.targets import LoraTarget, compiled

DECODER_PARTS = {"embed_tokens", "layers", "norm", "rotary_emb"}
"""Names of the modules of transformers' decoders that have no others."""


class CompiledLayer:
    """A fused decoder layer, described for compiled code."""

    def __init__(self, layer: Any, kernels: CpuKernels) -> None:
        self.kernels = kernels
        self.binding = layer.attention.lorikeet_binding
        self._attention, self._mlp = layer.attention, layer.mlp
        names = ("input_norm", "attended_norm", "mlp_norm", "output_norm")
        fused_norms = {name: getattr(layer, name) for name in names}
        self._norms = {name: None if fused is None else fused.norm for name, fused in fused_norms.items()}
        of_output = [part.adapters for part in (self._attention.out, self._mlp.down)]
        qkv, *ups = (fused.targets for fused in (self._attention.qkv_adapters, *self._mlp.up_adapters))
        targets = [*qkv, of_output[0], *(target for targets in ups for target in targets), of_output[1]]
        self.targets: list[LoraTarget] = [target for target in targets if target is not None]

    @cached_property
    def described(self) -> DecoderLayer:
        """Made at the first use: the addresses of weights are final then."""
        attention, (gate, up) = self._attention, self._mlp.ups
        query_norm, key_norm = attention.norms or (None, None)
        norms: dict[str, Norm | None] = {**self._norms, "query_norm": query_norm, "key_norm": key_norm}
        out, down = attention.out.matrix, self._mlp.down.matrix
        matrices = {"qkv": attention.qkv, "out": out, "gate": gate, "up": up, "down": down}
        layer = DecoderLayer(
            width=out.out_features,
            num_heads=attention.num_heads,
            num_kv_heads=attention.num_kv_heads,
            head_dim=attention.head_dim,
            num_hidden=gate.out_features,
            is_tanh=self._mlp.is_tanh,
            **{name: described_norm(norm) for name, norm in norms.items()},
            qkv_bias=address_of(attention.qkv.bias),
            out_bias=address_of(out.bias),
        )
        self.kernels.describe(layer, matrices)
        for index, target in enumerate(self.targets):
            layer.base_bias[index] = address_of(target.base_bias)
        return layer


class CompiledLayers:
    """Decoder layers that follow each other, as one call of compiled code, where it can call the attention."""

    def __init__(self, layers: Sequence[CompiledLayer], kinds: Sequence[int] | None = None) -> None:
        """layers: with the same kernels and attention backend; kinds: of each the place of its angles, 0 by default."""
        self._layers, self._kinds = layers, kinds or [0] * len(layers)
        self._code = layers[0].kernels.code
        self._bindings = [layer.binding for layer in layers]
        self._targets = [target for layer in layers for target in layer.targets]
        self._kvs: list[LayerKV | None] = []
        self._tables: list[Any] = []

    @cached_property
    def _described(self) -> DecoderLayers:
        return DecoderLayers([layer.described for layer in self._layers], self._kinds)

    def __call__(self, hidden_states: Tensor, angles: Sequence[PositionEmbeddings]) -> Tensor | None:
        """hidden_states: [1, T, H]; angles: of each kind of layers cos and sin, [1, T, D]. Returns [1, T, H], None
        where the parts have to be called one by one.
        """
        first = self._bindings[0]
        inputs = first.inputs
        has_others = inputs.changes_norms or (first.prefixes and inputs.virtual_rows)
        step = None if has_others else first.backend.native_step()
        adapters = None if step is None or not self._take_kv() else self._adapters()
        if adapters is None:
            return None
        in_order = [part for pair in angles for part in contiguous(pair)]
        made: Tensor = self._code.decoder_layers(self._described, step, adapters, hidden_states.contiguous(), in_order)
        return made

    def _take_kv(self) -> bool:
        """Give compiled code the addresses of the layers' KV; False if a layer has none."""
        kvs = [binding.kv for binding in self._bindings]
        if kvs != self._kvs:
            if None in kvs:
                return False
            native_layer = self._bindings[0].backend.native_layer
            self._described.kvs[:] = [native_layer(kv) for kv in kvs]
            self._kvs = kvs
        return True

    def _adapters(self) -> AdapterStep | None:
        """The adapters of the step; None if compiled code cannot reach them."""
        rows = self._targets[0].rows if self._targets else NO_ADAPTERS
        if not len(rows):
            return AdapterStep()
        function = compiled(torch.bfloat16)
        if function is None:
            return None
        tables = [target.table for target in self._targets]
        if tables != self._tables:
            addresses = map(ctypes.addressof, tables)
            for layer in self._layers:
                for index in range(len(layer.targets)):
                    layer.described.adapters[index] = next(addresses)
            self._tables = tables
        return AdapterStep(function, rows.address, len(rows))


class CompiledNetwork:
    """A causal language model: its modules, called without the code of transformers between them. A row has the bits
    that it has among others.
    """

    def __init__(self, decoder: Any, head: PackedLinear, layers: CompiledLayers, kinds: Sequence[str]) -> None:
        """kinds: of layers with angles of their own, in the order of their places; none where all have the same."""
        self._embedding: nn.Module = decoder.embed_tokens
        self._rotary: nn.Module = decoder.rotary_emb
        self._norm: nn.Module = decoder.norm
        self._head, self._layers = head, layers
        self._of_kinds = [{"layer_type": kind} for kind in kinds] or [{}]

    def __call__(self, input_ids: Tensor, position_ids: Tensor, rows: Tensor) -> Tensor | None:
        """input_ids, position_ids: [1, T]; rows: [S]. Returns their logits and what is appended to them, [1, S + E, V],
        or one row more; None where the network has to be called.
        """
        hidden = self._embedding(input_ids)
        angles = [self._rotary(hidden, position_ids=position_ids, **options) for options in self._of_kinds]
        hidden = self._layers(hidden, angles)
        if hidden is None:
            return None
        # [1, S, H]
        last = self._norm(hidden[:, rows])
        if last.shape[1] == 1 and self._head.matrix.least_rows > 1:
            last = last.expand(1, self._head.matrix.least_rows, -1)
        logits: Tensor = self._head(last)
        return logits


def compile_network(network: nn.Module) -> CompiledNetwork | None:
    """The compiled network, or None unless it consists of compiled decoder layers and the usual parts. Whether it
    computes what `network` computes is for the caller to check.
    """
    decoder, head = getattr(network, "model", None), getattr(network, "lm_head", None)
    if not isinstance(decoder, nn.Module) or not isinstance(head, PackedLinear):
        return None
    parts = dict(decoder.named_children())
    if parts.keys() != DECODER_PARTS or len(list(network.children())) != 2:
        return None
    if getattr(decoder.config, "final_logit_softcapping", None) is not None:  # what Gemma 2 does to logits
        return None
    layers = [getattr(layer, "compiled_layer", None) for layer in parts["layers"].children()]
    compiled: list[CompiledLayer] = [layer for layer in layers if layer is not None]
    if len(compiled) < len(layers) or len({layer.kernels.code for layer in compiled}) != 1:
        return None
    types: list[str] = []
    if "layer_type" in inspect.signature(parts["rotary_emb"].forward).parameters:
        types = list(getattr(decoder.config, "layer_types", []))
        if len(types) != len(compiled):
            return None
    kinds = sorted(set(types))
    return CompiledNetwork(decoder, head, CompiledLayers(compiled, [kinds.index(kind) for kind in types]), kinds)
