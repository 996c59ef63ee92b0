"""When FA3 is activated, with fakes of torch's registry of implementations: its kernels run on CUDA only."""

import importlib.util
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch
from structlog.testing import capture_logs

from lorikeet.shard import attention
from lorikeet.shard.attention import AttentionSpec, flash
from lorikeet.shard.attention.layerwise import LayerwiseAttention
from lorikeet.shard.attention.varlen import VarlenAttention
from lorikeet.shard.system import gpu
from tests.shard.attention.test_cpu import Runner, random_rows
from tests.shard.attention.test_varlen import written_out

if TYPE_CHECKING or importlib.util.find_spec("triton") is not None:
    from lorikeet.shard.attention.by_length import ByLengthAttention

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
CPU, CUDA, BFLOAT16 = torch.device("cpu"), torch.device("cuda"), torch.bfloat16
SPEC = AttentionSpec(4, 2, 16, 16, 0.25)


class Registry:
    """torch's registry, with an FA3 whose activation fails with `error`, or whose kernel does."""

    def __init__(self, error: Exception | None = None, in_kernel: Exception | None = None) -> None:
        self.active: str | None = None
        self._error, self._in_kernel = error, in_kernel
        self.calls: list[dict[str, Any]] = []

    def activate_flash_attention_impl(self, name: str) -> None:
        if self._error is not None:
            raise self._error
        self.active = name

    def list_flash_attention_impls(self) -> list[str]:
        return ["FA3", "FA4"]

    def current_flash_attention_impl(self) -> str | None:
        return self.active

    def restore_flash_attention_impl(self) -> None:
        self.active = None

    def varlen_attn(
        self, query: torch.Tensor, *arguments: Any, block_table: torch.Tensor, **named: Any
    ) -> torch.Tensor:
        self.calls.append(named | {"cu_seq_k": arguments[3], "block_table": block_table})
        if self._in_kernel is not None:
            raise self._in_kernel
        return torch.zeros_like(query)


NAMES = [name for name in vars(Registry) if name.endswith(("_impl", "_impls"))]


@pytest.fixture(autouse=True)
def hopper() -> Iterator[None]:
    with gpu.assumed((9, 0)):
        yield


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts a registry in the place of torch's."""

    def install(registry: Registry) -> Registry:
        for name in NAMES:
            monkeypatch.setattr(flash.attention, name, getattr(registry, name), raising=False)
        monkeypatch.setattr(flash.varlen, "varlen_attn", registry.varlen_attn)
        attempt = flash._try
        monkeypatch.setattr(flash, "_try", lambda _: attempt(CPU))
        return registry

    return install


def test_on_hopper_it_is_activated_tried_and_logged(installed: Any) -> None:
    registry = installed(Registry())
    with capture_logs() as logged:
        assert flash.choose_implementation(CUDA) == flash.choose_implementation(CUDA) == "FA3"
    event = {"event": "flash_attention", "log_level": "info", "implementation": "FA3", "keys": "in pages"}
    assert logged == [event] * 2
    [call] = registry.calls
    assert call["cu_seq_k"] is None and call["num_splits"] == 1 and call["block_table"].tolist() == [[0]]


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0), (12, 0)])
def test_elsewhere_it_is_not(installed: Any, capability: tuple[int, int]) -> None:
    registry = installed(Registry())
    with gpu.assumed(capability), capture_logs() as logged:
        assert flash.choose_implementation(CUDA) == "FA2"
    assert registry.active is None and logged[0]["reason"] == "FA3 needs compute capability 9.x"
    with capture_logs() as logged:
        assert flash.choose_implementation(CPU) == "FA2" and not logged


def test_a_torch_without_the_registry_runs_fa2(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delattr(flash.attention, name, raising=False)
    with capture_logs() as logged:
        assert flash.choose_implementation(CUDA) == "FA2"
    assert [each["reason"] for each in logged] == ["this version of torch offers no FA3"]


def test_without_its_package_the_log_says_so(installed: Any) -> None:
    """What torch raises on this machine too, which has no such package."""
    installed(Registry(ModuleNotFoundError("No module named 'flash_attn_interface'", name="flash_attn_interface")))
    with capture_logs() as logged:
        assert flash.choose_implementation(CUDA) == "FA2"
    event = {"event": "flash_attention", "log_level": "info", "implementation": "FA2", "keys": "in pages"}
    assert logged == [{**event, "reason": "the package flash_attn_interface is not installed"}]


@pytest.mark.parametrize("part", ["error", "in_kernel"])
def test_a_failure_is_a_warning_and_fa2_runs(installed: Any, part: str) -> None:
    registry = installed(Registry(**{part: RuntimeError("no kernel image\nand more")}))
    with capture_logs() as logged:
        assert flash.choose_implementation(CUDA) == "FA2"
    assert registry.active is None
    assert [each["event"] for each in logged] == ["flash_attention_3_failed", "flash_attention"]
    assert logged[0]["log_level"] == "warning" and logged[0]["reason"] == "RuntimeError: no kernel image"


def backends(backend: attention.AttentionBackend) -> list[attention.AttentionBackend]:
    assert isinstance(backend, LayerwiseAttention)
    return list(backend._backends)


def test_auto_takes_it_for_long_prompts_alone(installed: Any) -> None:
    installed(Registry())
    both, *others = backends(attention.create("auto", CUDA, BFLOAT16, None))
    assert isinstance(both, ByLengthAttention) and both.page_size == 64
    assert [type(each).__name__ for each in others] == ["PagedAttention", "ReferenceAttention"]
    assert {each.page_size for each in others} == {64}
    assert "by the longest request" in both.unsupported_reason(AttentionSpec(4, 2, 64, 64, 0.1, 512), BFLOAT16, CUDA)
    assert both.unsupported_reason(AttentionSpec(4, 2, 64, 64, 0.1), BFLOAT16, CUDA) == ""


def test_a_forced_backend_does_not_activate_it(installed: Any) -> None:
    registry = installed(Registry())
    for name in ("varlen", "triton"):
        attention.create(name, CUDA, BFLOAT16, None)
    assert registry.active is None


def test_it_gets_no_lengths_of_keys(installed: Any) -> None:
    """It rejects them next to a page table."""
    registry = installed(Registry())
    flash.choose_implementation(CUDA)
    calls: list[object] = []

    def kernel(*arguments: Any, **named: Any) -> torch.Tensor:
        query, keys, values, cu_rows, cu_keys, *most = arguments
        calls.append(cu_keys)
        return written_out(query, keys, values, cu_rows, cu_rows, *most, **named)

    ours = Runner(VarlenAttention(kernel=kernel), SPEC, BFLOAT16)
    ours.step([(0, [1], random_rows(SPEC, 20, BFLOAT16, 0))])
    assert registry.active == "FA3" and ours.backend.page_size == 64 and calls == [None]
