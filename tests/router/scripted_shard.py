"""A shard without a model, in the test's own process: it answers over a real socket with the token ids it was given.

Implements the protocol of the real one: Info, Serve, health, credit with acknowledgements, and aborts.
"""

import array
import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from lorikeet.proto import shard_pb2, shard_pb2_grpc
from lorikeet.proto.version import TAKES_COLUMNS, version

HEARTBEAT_S = 0.25


@dataclass
class Script:
    """What the shard answers to one Submit."""

    token_ids: Sequence[int]
    per_step: int = 1
    """Tokens per step: all but the last of a step are drafts that were accepted."""
    num_rejected: int = 0
    """Drafts of each step that were not."""
    step_seconds: float = 0.0
    error: str = ""
    """Ends the request with FINISH_ERROR after its tokens."""
    hangs: bool = False
    """Never finishes by itself, and sends nothing after its tokens."""
    logprobs: Sequence[float] | None = None
    """One per token; -0.1, -0.2, … when absent."""
    outputs: Sequence[shard_pb2.RequestOutput] = ()
    """Sent as they are, one after another, instead of all that is above."""


def _default_logprob(index: int) -> float:
    return -0.1 * (index + 1)


@dataclass
class ScriptedShard:
    """Serves on a Unix socket in `folder` from `async with` on."""

    folder: Path
    answer: Callable[[shard_pb2.Submit], Script]
    device: str = "cuda:0"
    draft_model_id: str = ""
    pooled_model: shard_pb2.PooledModel | None = None
    """The model of a shard that computes vectors or scores: `pooled_values` says which."""
    base_digest: str = "ba5e" * 16
    """Digest of the shard's files; "" where they have changed."""
    num_digests: int = 0
    """Number of calls of Digest."""
    max_total_tokens: int = 2048
    vocab_size: int = 300
    credit_requests: int = 256
    learning: shard_pb2.LearningReply = field(default_factory=shard_pb2.LearningReply)
    """What it answers about learning."""
    purges: list[bool] = field(default_factory=list)
    """By call of Learning."""
    submits: list[shard_pb2.Submit] = field(default_factory=list)
    commands: list[shard_pb2.Command] = field(default_factory=list)
    abort_ids: list[int] = field(default_factory=list)
    finished_ids: list[int] = field(default_factory=list)
    streams: "list[_Stream]" = field(default_factory=list)

    @property
    def address(self) -> str:
        return f"unix:{self.folder}/scripted.sock"

    async def __aenter__(self) -> Self:
        self._server = grpc.aio.server()
        shard_pb2_grpc.add_ShardServicer_to_server(_Servicer(self), self._server)
        healths = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(healths, self._server)
        for service in ("", "lorikeet.shard.v1.Shard"):
            await healths.set(service, health_pb2.HealthCheckResponse.SERVING)
        self._server.add_insecure_port(self.address)
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.stop(grace=0)

    def tell(self, *states: shard_pb2.AdapterState) -> None:
        """Send adapter states on every stream."""
        for stream in self.streams:
            stream.tell(states)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until `condition` holds; fails after a minute."""
        async with asyncio.timeout(60):
            while not condition():  # noqa: ASYNC110 - the condition depends on several objects
                await asyncio.sleep(0.005)

    @property
    def num_running(self) -> int:
        """Submitted, neither finished nor aborted."""
        return len({submit.id for submit in self.submits} - set(self.finished_ids) - set(self.abort_ids))


class _Servicer(shard_pb2_grpc.ShardServicer):
    def __init__(self, shard: ScriptedShard) -> None:
        self._shard = shard

    async def Info(self, request: shard_pb2.InfoRequest, context: grpc.aio.ServicerContext) -> shard_pb2.ShardInfo:
        shard = self._shard
        return shard_pb2.ShardInfo(
            token_masks=True,
            version=version(),
            model_id="test/model",
            dtype="torch.float32",
            device=shard.device,
            architecture="llama",
            vocab_size=shard.vocab_size,
            max_total_tokens=shard.max_total_tokens,
            page_size=16,
            num_pages=4096,
            step_tokens=4096,
            max_running=256,
            draft_model_id=shard.draft_model_id,
            grammars=True,
            history=True,
            learning=True,
            adapter_slots=16,
            most_composed=4,
            prefix_caching=True,
            chunked_prefill=True,
            watermark_gamma=0.25,
            watermark_delta=2.0,
            pooled_model=shard.pooled_model,
        )

    async def Digest(
        self, request: shard_pb2.DigestRequest, context: grpc.aio.ServicerContext
    ) -> shard_pb2.DigestReply:
        self._shard.num_digests += 1
        if not self._shard.base_digest:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "the model's files have changed")
        return shard_pb2.DigestReply(sha256=self._shard.base_digest)

    async def Learning(
        self, request: shard_pb2.LearningRequest, context: grpc.aio.ServicerContext
    ) -> shard_pb2.LearningReply:
        self._shard.purges.append(request.purge)
        return self._shard.learning

    async def Serve(
        self, commands: AsyncIterator[shard_pb2.Command], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[shard_pb2.StepOutput]:
        takes_columns = TAKES_COLUMNS in map(tuple, context.invocation_metadata() or ())
        stream = _Stream(self._shard, takes_columns)
        self._shard.streams.append(stream)
        reader = asyncio.create_task(stream.read(commands))
        try:
            while True:
                try:
                    async with asyncio.timeout(HEARTBEAT_S):
                        output = await stream.outputs.get()
                except TimeoutError:
                    output = stream.beat()
                yield output
        finally:
            reader.cancel()
            self._shard.streams.remove(stream)
            for task in stream.tasks.values():
                task.cancel()


class _Stream:
    """One router's connection."""

    def __init__(self, shard: ScriptedShard, takes_columns: bool) -> None:
        self._shard = shard
        self._takes_columns = takes_columns
        self._num_acknowledged = 0
        self._step = 0
        self.outputs: asyncio.Queue[shard_pb2.StepOutput] = asyncio.Queue()
        self.tasks: dict[int, asyncio.Task[None]] = {}
        self._send()

    async def read(self, commands: AsyncIterator[shard_pb2.Command]) -> None:
        async for command in commands:
            self._shard.commands.append(command)
            for submit in command.submits:
                self._shard.submits.append(submit)
                self._num_acknowledged += 1
                # now: once a test sees the request, it may change what the next one gets
                script = None if self._shard.pooled_model is not None else self._shard.answer(submit)
                self.tasks[submit.id] = asyncio.create_task(self._run(submit, script))
            for request_id in command.abort_ids:
                self._shard.abort_ids.append(request_id)
                task = self.tasks.pop(request_id, None)
                if task is not None:
                    task.cancel()
                    self._send(shard_pb2.RequestOutput(id=request_id, finish_reason=shard_pb2.FINISH_ABORTED))

    async def _run(self, submit: shard_pb2.Submit, script: Script | None) -> None:
        if script is None:
            assert self._shard.pooled_model is not None
            await self._recite(submit, [_pooled(submit, self._shard.pooled_model)])
            return
        if script.outputs:
            await self._recite(submit, script.outputs)
            return
        ids = list(script.token_ids)[: submit.max_new_tokens]
        stop_at = next((index for index, token in enumerate(ids) if token in submit.stop_ids), None)
        if stop_at is not None:
            ids = ids[: stop_at + 1]
        for start in range(0, max(len(ids), 1), script.per_step):
            await asyncio.sleep(script.step_seconds)
            indices = range(start, min(start + script.per_step, len(ids)))
            output = _output(submit, script, ids, indices)
            if indices.stop >= len(ids) and not script.hangs:
                self._finish(output, submit, script, ended=stop_at is not None)
            elif start and len(indices) == 1 and not output.num_drafted and self._takes_columns:
                self._send(columns=[_columns(output)])
                continue
            self._send(output)

    async def _recite(self, submit: shard_pb2.Submit, outputs: Sequence[shard_pb2.RequestOutput]) -> None:
        for sent in outputs:
            await asyncio.sleep(0)
            output = shard_pb2.RequestOutput(id=submit.id)
            output.MergeFrom(sent)
            if output.finish_reason:
                self._shard.finished_ids.append(submit.id)
                self.tasks.pop(submit.id, None)
            self._send(output)

    def _finish(
        self, output: shard_pb2.RequestOutput, submit: shard_pb2.Submit, script: Script, *, ended: bool
    ) -> None:
        self._shard.finished_ids.append(submit.id)
        self.tasks.pop(submit.id, None)
        output.finish_reason = shard_pb2.FINISH_EOS if ended else shard_pb2.FINISH_LENGTH
        if script.error:
            output.finish_reason = shard_pb2.FINISH_ERROR
            output.error = script.error

    def beat(self) -> shard_pb2.StepOutput:
        """A step without tokens."""
        self._step += bool(self.tasks)
        return shard_pb2.StepOutput(step=self._step)

    def tell(self, states: Sequence[shard_pb2.AdapterState]) -> None:
        self.outputs.put_nowait(shard_pb2.StepOutput(adapters=states))

    def _send(self, *outputs: shard_pb2.RequestOutput, columns: Sequence[shard_pb2.TokenColumns] = ()) -> None:
        self._step += 1
        room = self._shard.credit_requests - len(self.tasks)
        credit = shard_pb2.Credit(
            num_requests=max(room, 0), num_kv_tokens=1_000_000, acknowledged=self._num_acknowledged
        )
        output = shard_pb2.StepOutput(step=self._step, credit=credit, outputs=outputs, columns=columns)
        self.outputs.put_nowait(output)


def pooled_values(ids: Sequence[int], size: int) -> list[float]:
    """The vector or the scores of some tokens: numbers that float32 represents exactly."""
    return [(sum(ids) * (index + 1) % 17 - 8) / 4 for index in range(size)]


def _pooled(submit: shard_pb2.Submit, model: shard_pb2.PooledModel) -> shard_pb2.RequestOutput:
    """Output for a whole prompt, or for every token."""
    ids = list(submit.prompt_ids)
    parts = [[token_id] for token_id in ids] if submit.pooling.per_token else [ids]
    values = [value for part in parts for value in pooled_values(part, model.size)]
    return shard_pb2.RequestOutput(pooled=array.array("f", values).tobytes(), finish_reason=shard_pb2.FINISH_LENGTH)


def _output(submit: shard_pb2.Submit, script: Script, ids: list[int], indices: range) -> shard_pb2.RequestOutput:
    """The part of a request's answer that one step gives."""
    requested = submit.logprobs
    output = shard_pb2.RequestOutput(id=submit.id, token_ids=[ids[index] for index in indices])
    num_accepted = max(0, len(indices) - 1)
    own = shard_pb2.SOURCE_BONUS if num_accepted else shard_pb2.SOURCE_TARGET
    output.sources = bytes([shard_pb2.SOURCE_LOOKUP] * num_accepted + [own] * bool(len(indices)))
    if num_accepted + script.num_rejected:
        output.num_drafted.extend([num_accepted + script.num_rejected, 0, 0])
    output.num_accepted = num_accepted
    output.step_ends = bytes([0] * (len(indices) - 1) + [1]) if len(indices) else b""
    logprobs = script.logprobs or [_default_logprob(index) for index in range(len(ids))]
    if requested.wanted:
        output.logprobs.extend(logprobs[index] for index in indices)
    for index in indices:
        if requested.alternative_ids:
            output.alternative_ids.extend(requested.alternative_ids)
            output.alternative_logprobs.extend(-float(token_id) for token_id in requested.alternative_ids)
            continue
        for rank in range(requested.alternatives):
            output.alternative_ids.append(ids[index] + rank)
            output.alternative_logprobs.append(logprobs[index] - rank)
    if indices.start == 0 and requested.prefill:
        num_prompt = len(submit.prompt_ids)
        output.prefill_logprobs.extend(-0.5 for _ in range(num_prompt - 1))
        output.prefill_ranks.extend(1 for _ in range(num_prompt - 1) if requested.prefill_ranks)
        for position in range(1, num_prompt):
            for rank in range(requested.prefill_alternatives):
                output.prefill_alternative_ids.append(submit.prompt_ids[position] + rank)
                output.prefill_alternative_logprobs.append(-0.5 - rank)
    return output


def _columns(output: shard_pb2.RequestOutput) -> shard_pb2.TokenColumns:
    """What a request gets that only decodes: one token without drafts."""
    return shard_pb2.TokenColumns(
        ids=[output.id],
        token_ids=output.token_ids,
        logprobs=output.logprobs,
        alternative_ids=output.alternative_ids,
        alternative_logprobs=output.alternative_logprobs,
    )
