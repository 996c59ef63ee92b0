"""vLLM's names: in addition to LoRAX's, with its types and labels, and only where they are asked for."""

import time
from pathlib import Path

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from tests.router.serving import MODEL_ID, Serving, serving

pytestmark = pytest.mark.anyio

COMMON = {"model_name", "engine"}
TYPES = {
    "num_requests_running": "gauge",
    "num_requests_waiting": "gauge",
    "kv_cache_usage_perc": "gauge",
    "num_preemptions": "counter",
    "prompt_tokens": "counter",
    "generation_tokens": "counter",
    "prefix_cache_queries": "counter",
    "prefix_cache_hits": "counter",
    "request_success": "counter",
    "spec_decode_num_drafts": "counter",
    "spec_decode_num_draft_tokens": "counter",
    "spec_decode_num_accepted_tokens": "counter",
    "spec_decode_num_accepted_tokens_per_pos": "counter",
    "time_to_first_token_seconds": "histogram",
    "inter_token_latency_seconds": "histogram",
    "request_time_per_output_token_seconds": "histogram",
    "e2e_request_latency_seconds": "histogram",
    "request_queue_time_seconds": "histogram",
    "request_inference_time_seconds": "histogram",
    "request_prefill_time_seconds": "histogram",
    "request_decode_time_seconds": "histogram",
    "request_prompt_tokens": "histogram",
    "request_generation_tokens": "histogram",
    "request_params_max_tokens": "histogram",
    "request_max_num_generation_tokens": "histogram",
    "iteration_tokens_total": "histogram",
    "cache_config_info": "gauge",
    "lora_requests_info": "gauge",
}
FLAGS = {"flags": {"max-active-adapters": 64}}


async def families(server: Serving) -> dict[str, Metric]:
    text = (await server.client.get("/metrics")).text
    return {family.name: family for family in text_string_to_metric_families(text)}


def value(metrics: dict[str, Metric], name: str, **labels: str) -> float:
    samples = [sample for family in metrics.values() for sample in family.samples if sample.name == f"vllm:{name}"]
    [sample] = [sample for sample in samples if labels.items() <= sample.labels.items()]
    return float(sample.value)


async def test_names_types_and_labels_are_vllm_s(tmp_path: Path, anyio_backend: str) -> None:
    async with serving(tmp_path, adapters=True, metrics_prefix=("vllm",), effective_configuration=FLAGS) as server:
        server.says("abcd")
        body = {"inputs": "Hello", "parameters": {"max_new_tokens": 4}}
        assert (await server.client.post("/generate", json=body)).status_code == 200
        metrics = await families(server)
        assert {name: metrics[f"vllm:{name}"].type for name in TYPES} == TYPES
        for name in TYPES.keys() - {"cache_config_info", "lora_requests_info"}:
            for sample in metrics[f"vllm:{name}"].samples:
                assert sample.labels.keys() >= COMMON
                assert (sample.labels["model_name"], sample.labels["engine"]) == (MODEL_ID, "0")
        assert value(metrics, "generation_tokens_total") == 4
        assert value(metrics, "request_success_total", finished_reason="length") == 1
        for name in ("e2e_request_latency_seconds", "time_to_first_token_seconds", "request_generation_tokens"):
            assert value(metrics, f"{name}_count") == 1
        assert value(metrics, "inter_token_latency_seconds_count") == 3
        assert value(metrics, "cache_config_info", block_size="16", num_gpu_blocks="4096") == 1
        assert "lorax_request_count" in metrics  # LoRAX's names stay


async def test_the_way_a_request_ends_is_counted(tmp_path: Path, anyio_backend: str) -> None:
    async with serving(tmp_path, metrics_prefix=("vllm",)) as server:
        server.says("abc", ends=True)
        await server.client.post("/generate", json={"inputs": "Hello"})
        server.says("abc", error="broken")
        await server.client.post("/generate", json={"inputs": "Hello"})
        server.says("abc", hangs=True)
        async with server.client.stream("POST", "/generate_stream", json={"inputs": "Hello"}) as response:
            await anext(response.aiter_lines())
        await server.idle()
        metrics = await families(server)
        reasons = {
            reason: value(metrics, "request_success_total", finished_reason=reason) for reason in ("stop", "error")
        }
        assert reasons == {"stop": 1, "error": 1}
        assert value(metrics, "request_success_total", finished_reason="abort") == 1


async def test_adapters_with_requests_are_listed(tmp_path: Path, anyio_backend: str) -> None:
    async with serving(tmp_path, adapters=True, metrics_prefix=("vllm",), effective_configuration=FLAGS) as server:
        server.adapter("first")
        server.says("abc", hangs=True)
        body = {"inputs": "Hello", "parameters": {"adapter_id": "first"}}
        async with server.client.stream("POST", "/generate_stream", json=body) as response:
            await anext(response.aiter_lines())
            [sample] = (await families(server))["vllm:lora_requests_info"].samples
        [running] = sample.labels["running_lora_adapters"].split(",")
        assert (sample.labels["max_lora"], sample.labels["waiting_lora_adapters"]) == ("64", "")
        assert len(running) == 12  # the beginning of its digest: it has no alias
        assert abs(sample.value - time.time()) < 60


async def test_without_the_flag_there_are_none(tmp_path: Path, anyio_backend: str) -> None:
    async with serving(tmp_path) as server:
        assert not [name for name in await families(server) if name.startswith("vllm:")]
