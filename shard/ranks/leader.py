"""The first rank's side: starts the other ranks, sends them commands, and ends the shard when one of them has ended."""

import socket
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from multiprocessing.connection import Connection

import structlog
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from lorikeet.proto.process import start_connected
from lorikeet.shard.batch.inputs import RankDesync, StepInputs
from lorikeet.shard.batch.padding import Bounds, Padding
from lorikeet.shard.config import ShardConfig
from lorikeet.shard.model.tensor_parallel.group import RANK_EXIT, Group, prefer_loopback
from lorikeet.shard.ranks.commands import (
    AllocateKv,
    Begin,
    BeginMemory,
    Capture,
    Command,
    EndMemory,
    FreeKv,
    Serve,
    StepCommand,
)
from lorikeet.shard.system.process import end_process

log = structlog.get_logger()

RENDEZVOUS_S = 120.0
"""Time that the ranks wait for each other at start."""
STEP_S = 120.0
"""Time that they wait for each other in a step."""
GRACE_S = 1.0
"""Time after the end of another rank in which this one may still log its own error."""
END_S = 10.0


class Leader:
    """The first rank's connections to the others. Commands are sent by one thread."""

    def __init__(self, config: ShardConfig) -> None:
        """Starts the other ranks, which load the model after `meet`. Raises ValueError if the store cannot listen."""
        prefer_loopback(config.master_addr)
        self._store = _store(config)
        self._group: Group | None = None
        self._is_ending = False
        self._config = config
        self._links: list[Connection] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        for rank in range(1, config.num_ranks):
            self._start(rank)

    @property
    def group(self) -> Group:
        """All ranks, from `meet` on."""
        assert self._group is not None, "the ranks have not met yet"
        return self._group

    def meet(self) -> Group:
        """Wait for the other ranks. Raises RuntimeError if they do not connect, ValueError as `Group` does."""
        config, device = self._config, torch.device(self._config.device)
        has_symmetric_memory = config.symmetric_memory_all_reduce
        self._group = Group(0, config.num_ranks, self._store, device, RENDEZVOUS_S, has_symmetric_memory)
        return self._group

    def end(self) -> None:
        """End the other ranks, after the last step."""
        self._is_ending = True
        for link in self._links:
            link.close()
        for process in self._processes:
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()

    def step(self, inputs: StepInputs) -> None:
        """Have the other ranks compute the step that `inputs` describes."""
        inputs.put_device_tokens()  # which the other ranks do not know
        on_cpu = inputs.device.type == "cpu"
        token_ids = inputs.input_ids.tolist() if on_cpu else None
        self.send(StepCommand(inputs.segments, len(inputs.input_ids), token_ids, list(inputs.host_rows), inputs.heads))
        if not on_cpu:
            self.group.broadcast(inputs.input_ids)

    def allocate_kv(self, num_pages: int) -> None:
        self.send(AllocateKv(num_pages))

    def begin_memory(self) -> None:
        self.send(BeginMemory())

    def least_memory(self, num_bytes: int, spare: int) -> int:
        self.send(EndMemory(spare))
        return self.group.least(num_bytes)

    def serve(self) -> None:
        """Everything is loaded: from now on ranks do not wait for each other any longer than a step takes."""
        self.send(Serve())
        self.group.serve(STEP_S)

    def free_kv(self) -> None:
        self.send(FreeKv())

    def capture(self, padding: Padding, bounds: Sequence[Bounds], is_checked: bool) -> None:
        self.send(Capture(padding, bounds, is_checked))

    def agree(self, reason: str) -> str:
        return self.group.agree(reason)

    def send(self, command: Command) -> None:
        """Raises RankDesync if a rank has ended."""
        try:
            for link in self._links:
                link.send(command)
        except OSError as error:
            raise RankDesync("a rank of this shard has ended") from error

    def _start(self, rank: int) -> None:
        process, ours = start_connected("lorikeet.shard.startup.rank_main")
        link = Connection(ours.detach())
        link.send(Begin(asdict(self._config), rank, self._config.master_addr, self._store.port))
        self._links.append(link)
        self._processes.append(process)
        threading.Thread(target=self._watch, args=(rank, process), name=f"rank {rank}", daemon=True).start()

    def _watch(self, rank: int, process: "subprocess.Popen[bytes]") -> None:
        code = process.wait()
        if self._is_ending:
            return
        time.sleep(GRACE_S)
        log.error("rank_ended", rank=rank, code=code)
        end_process(RANK_EXIT)


def _store(config: ShardConfig) -> TCPStore:
    """The store at which the ranks meet. torch's own listener would accept connections on every address."""
    host = config.master_addr
    try:
        family = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, config.master_port), family=family)
    except OSError as error:
        reason = str(error.strerror or error).partition(" (")[0]
        raise ValueError(f"the ranks cannot meet at {host}:{config.master_port}: {reason}") from error
    port = listener.getsockname()[1]
    return TCPStore(
        host, port, config.num_ranks, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def device_of(config: ShardConfig, rank: int) -> str:
    """The device of a rank: CUDA devices are numbered from the first rank's on."""
    kind, colon, number = config.device.partition(":")
    return f"{kind}:{int(number) + rank}" if colon else config.device
