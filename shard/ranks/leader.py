"""The first rank's side: starts the others, tells them what to do, and ends the shard where one of them has ended."""

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection

import structlog
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from lorikeet.shard.batch.inputs import RankDesync, StepInputs
from lorikeet.shard.batch.padding import Bounds, Padding
from lorikeet.shard.config import ShardConfig
from lorikeet.shard.model.tensor_parallel.group import RANK_EXIT, Group, prefer_loopback
from lorikeet.shard.ranks.commands import (
    AllocateAdapters,
    AllocateKv,
    Begin,
    Capture,
    Clear,
    Command,
    Forget,
    FreeKv,
    Put,
    Read,
    Step,
)
from lorikeet.shard.system.process import end_process

log = structlog.get_logger()

MEETING_S = 120.0
"""So long the ranks wait for each other, when they begin."""
GRACE_S = 1.0
"""So long after a rank has ended this one may still say why itself."""
END_S = 10.0


@dataclass(frozen=True)
class Ranks:
    """All of them, as the first one has them."""

    leader: "Leader"
    group: Group


class Leader:
    """Of one shard. Commands are for one thread."""

    def __init__(self, config: ShardConfig) -> None:
        """Starts the other ranks, which load the model once they have met: see `meet`. Raises ValueError where that
        cannot be.
        """
        prefer_loopback(config.master_addr)
        self._store = _store(config)
        self._group: Group | None = None
        self._is_ending = False
        self._config = config
        self._links: list[Connection] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        for rank in range(1, config.num_ranks):
            self._start(rank)

    def meet(self) -> Ranks:
        """Wait for the others. Raises RuntimeError where they do not come."""
        self._group = group = Group(
            0, self._config.num_ranks, self._store, torch.device(self._config.device), MEETING_S
        )
        return Ranks(self, group)

    def end(self) -> None:
        """Let the others end: nothing is computed any more."""
        self._is_ending = True
        for link in self._links:
            link.close()
        for process in self._processes:
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()

    # What the network says

    def step(self, inputs: StepInputs) -> None:
        """Compute along what `inputs` describes."""
        on_cpu = inputs.device.type == "cpu"
        token_ids = inputs.input_ids.tolist() if on_cpu else None
        num_tokens = inputs.input_ids.shape[0]
        self._tell(Step(inputs.segments, num_tokens, token_ids, list(inputs.host_rows), inputs.heads))
        if not on_cpu:
            assert self._group is not None
            self._group.broadcast(inputs.input_ids)

    def allocate_kv(self, num_pages: int) -> None:
        """Have so many pages."""
        self._tell(AllocateKv(num_pages))

    def free_kv(self) -> None:
        """Have no pages."""
        self._tell(FreeKv())

    def capture(self, padding: Padding, bounds: Sequence[Bounds], is_checked: bool) -> None:
        """Capture the same steps, at the same time."""
        self._tell(Capture(padding, bounds, is_checked))

    # What is said of adapters

    def allocate_adapters(self, num_slots: int, host_bytes: int) -> None:
        """Have room for adapters."""
        self._tell(AllocateAdapters(num_slots, host_bytes))

    def read(self, digest: str) -> None:
        """Bring an adapter into host memory."""
        self._tell(Read(digest))

    def put(self, slot: int, digest: str) -> None:
        """Let a slot mean an adapter."""
        self._tell(Put(slot, digest))

    def clear(self, slot: int) -> None:
        """Let a slot mean nothing."""
        self._tell(Clear(slot))

    def forget(self, digest: str) -> None:
        """Let go of an adapter."""
        self._tell(Forget(digest))

    def _tell(self, command: Command) -> None:
        """Raises RankDesync where somebody is gone."""
        try:
            for link in self._links:
                link.send(command)
        except OSError as error:
            raise RankDesync("a rank of this shard is gone") from error

    def _start(self, rank: int) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            descriptor = theirs.fileno()
            command = [sys.executable, "-m", "lorikeet.shard.startup.rank_main", str(descriptor)]
            process = subprocess.Popen(command, pass_fds=[descriptor], stdin=subprocess.DEVNULL)
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
        log.error("a rank of this shard has ended", rank=rank, code=code)
        end_process(RANK_EXIT)


def _store(config: ShardConfig) -> TCPStore:
    """Where the ranks find each other. torch's own would listen on every address of the machine."""
    host = config.master_addr
    try:
        listener = socket.create_server((host, config.master_port), family=_family(host))
    except OSError as error:
        said = str(error.strerror or error).partition(" (")[0]
        reason = f"the ranks cannot meet at {host}:{config.master_port}: {said}"
        raise ValueError(reason) from error
    port = listener.getsockname()[1]
    return TCPStore(
        host, port, config.num_ranks, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def _family(host: str) -> socket.AddressFamily:
    return socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]


def device_of(config: ShardConfig, rank: int) -> str:
    """What a rank computes on: CUDA devices are dealt out from the first rank's on."""
    kind, colon, number = config.device.partition(":")
    return f"{kind}:{int(number) + rank}" if colon else config.device
