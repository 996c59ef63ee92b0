"""The routes that compare texts: `/score` and `/rerank`, by a cross-encoder, or by the cosines of embeddings."""

from dataclasses import replace

import numpy as np
import orjson
from starlette.requests import Request
from starlette.responses import Response

from lorikeet.proto.pooling import CLASSIFY, EMBED
from lorikeet.router.api.pooled.classification import envelope
from lorikeet.router.api.pooled.compute import Computed, Values, activated, check_task, compute
from lorikeet.router.api.pooled.embeddings import check_activation, prompted
from lorikeet.router.api.pooled.files import PooledFiles
from lorikeet.router.api.prepare import Timing, now
from lorikeet.router.api.service import Service
from lorikeet.router.errors import WrongTask
from lorikeet.router.schemas.pooled import Pairs, RerankRequest, ScoreRequest


class PairRoutes:
    """The handlers."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._files = PooledFiles(service.config)

    async def score(self, request: Request) -> Response:
        """vLLM's: one text with each of the others, or pair by pair."""
        service, timing = self._service, Timing(now())
        body = service.openai_defaults(service.caller(request), await service.body(request))
        wanted = ScoreRequest.read(body).to_request(service.config)
        scores, computed = await self._scores(request, wanted, timing, wanted_names=("text_1", "text_2"))
        data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores.tolist())]
        name = wanted.common.adapter.name or service.config.model_name
        answer = {**envelope("score", name), "object": "list", "data": data, "usage": computed.usage}
        return Response(orjson.dumps(answer), headers=computed.headers, media_type="application/json")

    async def rerank(self, request: Request) -> Response:
        """Jina's and Cohere's: the documents, the most relevant first."""
        service, timing = self._service, Timing(now())
        body = service.openai_defaults(service.caller(request), await service.body(request))
        wanted = RerankRequest.read(body).to_request(service.config)
        scores, computed = await self._scores(request, wanted, timing, wanted_names=("query", "documents"))
        order = np.argsort(-scores, kind="stable")[: wanted.top_n]
        results = [
            {"index": int(index), "document": {"text": wanted.second[index]}, "relevance_score": float(scores[index])}
            for index in order
        ]
        name = wanted.common.adapter.name or service.config.model_name
        answer = {**envelope("rerank", name), "usage": computed.usage, "results": results}
        return Response(orjson.dumps(answer), headers=computed.headers, media_type="application/json")

    async def _scores(
        self, request: Request, wanted: Pairs, timing: Timing, wanted_names: tuple[str, str]
    ) -> tuple[Values, Computed]:
        """[pairs] float32."""
        model = check_task(self._service, CLASSIFY, EMBED)
        if model.task == EMBED:
            check_activation(wanted.use_activation)
            return await self._cosines(request, wanted, timing, wanted_names[1])
        cut = replace(wanted.common.cut, has_types=self._files.has_token_types)
        common = replace(wanted.common, cut=cut)
        computed = await compute(self._service, request, wanted.pairs, common, timing, wanted_names[1])
        logits = np.concatenate(computed.values)
        if logits.shape[1] != 1:
            raise WrongTask(f"scores of pairs need a model with one label, and this one has {logits.shape[1]}")
        scores = activated(logits, self._files.activation) if wanted.use_activation else logits
        return scores[:, 0], computed

    async def _cosines(self, request: Request, wanted: Pairs, timing: Timing, field: str) -> tuple[Values, Computed]:
        texts = prompted(self._files, [*wanted.first, *wanted.second])
        computed = await compute(self._service, request, texts, wanted.common, timing, field)
        vectors = np.concatenate(computed.values).astype(np.float64)
        vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
        first, second = vectors[: len(wanted.first)], vectors[len(wanted.first) :]
        return np.asarray((first * second).sum(1), np.float32), computed
