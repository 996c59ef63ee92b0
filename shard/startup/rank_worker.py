"""Every rank but the first: executes the first rank's commands in order, until that one closes the socket."""

from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import structlog
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from lorikeet.proto import logs
from lorikeet.shard.adapters.manager import AdapterReader, CollectiveReader, prepare
from lorikeet.shard.config import ShardConfig
from lorikeet.shard.grpc.streams import AdapterRead, Inbox
from lorikeet.shard.model import Model, load_model
from lorikeet.shard.model.adapters.loading import AdapterContent
from lorikeet.shard.model.graphs import CannotCapture, CudaRecorder
from lorikeet.shard.model.kv_memory import StepMemory
from lorikeet.shard.model.tensor_parallel.group import Group, prefer_loopback
from lorikeet.shard.ranks import commands
from lorikeet.shard.ranks.leader import RENDEZVOUS_S, STEP_S, device_of
from lorikeet.shard.scheduler.adapter_slots import Device

log = structlog.get_logger()


class RankWorker:
    """One rank with its part of the model."""

    def __init__(self, config: ShardConfig, model: Model, group: Group) -> None:
        self._config, self._model, self._group = config, model, group
        self._inbox = Inbox()
        """Adapters that its reader has read."""
        self._reader: AdapterReader | None = None
        self._device: Device | None = None
        self._contents: dict[str, AdapterContent] = {}
        self._copying: set[int] = set()
        self._memory: StepMemory | None = None

    @torch.inference_mode()
    def execute(self, command: commands.Command) -> None:
        """Execute one command. An error here desynchronises the ranks, and ends this one."""
        match command:
            case commands.StepCommand():
                self._step(command)
            case commands.AllocateKv(num_pages):
                self._model.allocate_kv(num_pages)
            case commands.FreeKv():
                self._model.free_kv()
            case commands.BeginMemory():
                self._memory = StepMemory(self._model.info.device)
            case commands.EndMemory(spare):
                assert self._memory is not None
                self._group.least(self._memory.room(self._config, spare))
            case commands.WarmUpAdapters():
                self._model.warm_up_adapters()
            case commands.Serve():
                self._group.serve(STEP_S)
            case commands.Capture(padding, bounds, is_checked):
                recorder = CudaRecorder(self._model.info.device)
                with suppress(CannotCapture):  # every rank gives up, and the first one logs why
                    self._model.capture(padding, recorder, bounds, is_checked, self._group.agree)
            case commands.AllocateAdapters(num_slots, host_bytes):
                self._allocate_adapters(num_slots, host_bytes)
            case _:
                self._change_adapters(command)

    def _step(self, step: commands.StepCommand) -> None:
        device, inputs = self._model.info.device, self._model.inputs
        if self._device is not None:
            while self._copying:
                self._copying = {slot for slot in self._copying if not self._device.is_ready(slot)}
        if step.token_ids is None:
            input_ids = torch.empty(step.num_tokens, dtype=torch.long, device=device)
            self._group.broadcast(input_ids)
        else:
            input_ids = torch.tensor(step.token_ids, dtype=torch.long)
        rows = torch.tensor(step.logits_rows, dtype=torch.long)
        inputs.fill(step.segments, input_ids, rows, step.logits_rows, step.heads)
        self._model.forward()

    def _allocate_adapters(self, num_slots: int, host_bytes: int) -> None:
        assert self._config.adapter_store is not None
        self._device, files, _ = prepare(self._config, self._model, num_slots, host_bytes, self._group.add_up)
        read = CollectiveReader(files, self._group).read
        self._reader = AdapterReader(Path(self._config.adapter_store), read, self._inbox)

    def _change_adapters(
        self, command: commands.Read | commands.Put | commands.Clear | commands.Compose | commands.Forget
    ) -> None:
        assert self._device is not None and self._reader is not None
        self._take_contents()
        match command:
            case commands.Read(digest):
                self._reader.request(digest)
            case commands.Put(slot, digest):
                while digest not in self._contents:  # the first rank may learn earlier that every rank has read it
                    self._inbox.wait()
                    self._take_contents()
                self._device.put(slot, self._contents[digest])
                self._copying.add(slot)
            case commands.Clear(slot):
                self._device.clear(slot)
                self._copying.discard(slot)
            case commands.Compose(slot, composition, slots):
                self._device.compose(slot, composition, slots)
            case commands.Forget(digest):
                self._contents.pop(digest, None)

    def _take_contents(self) -> None:
        for item in self._inbox.drain():
            if isinstance(item, AdapterRead) and isinstance(item.content, AdapterContent):
                self._contents[item.digest] = item.content


def run_rank(link: Connection) -> None:
    """Run a rank until the first one closes its end. Raises ValueError if the model cannot be served."""
    begin: commands.Begin = link.recv()
    prefer_loopback(begin.host)
    config = ShardConfig(**begin.config)
    config = replace(config, device=device_of(config, begin.rank))
    logs.configure(config.json_output, config.log_level, "shard")
    structlog.contextvars.bind_contextvars(rank=begin.rank)
    logs.adopt_libraries()
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    store = TCPStore(begin.host, begin.port, config.num_ranks, is_master=False)
    device, has_symmetric_memory = torch.device(config.device), config.symmetric_memory_all_reduce
    group = Group(begin.rank, config.num_ranks, store, device, RENDEZVOUS_S, has_symmetric_memory)
    model = load_model(config, group)
    logs.adopt_libraries()
    worker = RankWorker(config, model, group)
    while True:
        try:
            command: commands.Command = link.recv()
        except EOFError:
            return
        worker.execute(command)
