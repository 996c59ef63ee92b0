"""Kernels compiled in advance: chosen by the processor, found without a compiler, and equal to those compiled here."""

import ctypes
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from lorikeet.shard.attention import cpu as attention
from lorikeet.shard.batch.inputs import StepInputs
from lorikeet.shard.model.kernels import cpu as products
from lorikeet.shard.model.kernels import float32, integer
from lorikeet.shard.model.lora import targets
from lorikeet.shard.system import native, prebuilt
from tests.shard.attention.test_cpu import KINDS, PAGES, Runner, random_rows, spec_of
from tests.shard.model.kernels.test_integer import drawn, rows_of
from tests.shard.model.lora.test_targets import COUNTS, MIXES, fill, make_target

needs_gcc = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
OWN = [level for level in prebuilt.own_levels() if not level.only]
V3 = next(level for level in prebuilt.LEVELS if level.name == "x86-64-v3")


def test_a_wheel_is_for_the_c_library_that_its_kernels_need(tmp_path: Path) -> None:
    """Whatever the machine has that builds it; one that no test has seen is never promised."""
    assert prebuilt.needed_glibc(tmp_path) == (2, 34)
    inside = tmp_path / "lorikeet" / "level"
    inside.mkdir(parents=True)
    (inside / "old.so").write_bytes(b"\0GLIBC_2.17\0GLIBC_2.2.5\0GLIBC_PRIVATE\0")
    assert prebuilt.needed_glibc(tmp_path) == (2, 34)
    (inside / "new.so").write_bytes(b"\0memcpy\0GLIBC_2.38\0")
    assert prebuilt.needed_glibc(tmp_path) == (2, 38)


@needs_gcc
def test_own_kernels_need_no_newer_c_library(tmp_path: Path) -> None:
    compiled = native.library(Path(targets.__file__).with_suffix(".c"))._name
    shutil.copy(compiled, tmp_path)
    assert prebuilt.needed_glibc(tmp_path) == (2, 34)


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The libraries of this machine's best level."""
    folder = tmp_path_factory.mktemp("prebuilt")
    assert prebuilt.build(folder, OWN[:1]) == []
    return folder


@pytest.mark.parametrize(
    ("machine", "instructions", "level"),
    [
        ("x86_64", prebuilt._V4 | {"avx512_bf16", "amx_tile"}, "x86-64-v4-bf16"),
        ("x86_64", prebuilt._V4, "x86-64-v4"),
        ("x86_64", prebuilt._V3 | {"avx512f"}, "x86-64-v3"),
        ("x86_64", prebuilt._V3 - {"fma"}, "x86-64-v2"),
        ("x86_64", frozenset({"sse2"}), None),
        ("aarch64", frozenset({"fp", "asimd"}), "aarch64"),
        ("riscv64", prebuilt._V4, None),
    ],
)
def test_the_processor_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, machine: str, instructions: frozenset[str], level: str | None
) -> None:
    for each in prebuilt.LEVELS:
        (tmp_path / each.name).mkdir()
        (tmp_path / each.name / "attention.cpu.BF16=1.PAIRED=1.so").touch()
    monkeypatch.setattr(prebuilt, "FOLDER", tmp_path)
    monkeypatch.setattr(prebuilt, "_instructions", lambda: instructions)
    monkeypatch.setattr(prebuilt.platform, "machine", lambda: machine)
    found = prebuilt.find(attention.SOURCE, ("BF16=1", "PAIRED=1"))
    assert (found and found.parent.name) == level
    assert prebuilt.find(attention.SOURCE, ("BF16=2",)) is None
    assert prebuilt.find(tmp_path / "other.c", ()) is None


@pytest.mark.parametrize(
    ("machine", "instructions", "level"),
    [
        ("x86_64", prebuilt._V4 | {"avx512_vnni", "avx512_bf16"}, "x86-64-v4-vnni"),
        ("x86_64", prebuilt._V4 | {"avx512_bf16"}, "x86-64-v4-bf16"),
        ("x86_64", prebuilt._V3 | {"avx_vnni"}, "x86-64-v3-vnni"),
        ("x86_64", prebuilt._V3, "x86-64-v3"),
        ("aarch64", frozenset({"asimd", "asimddp"}), "aarch64-dotprod"),
        ("aarch64", frozenset({"asimd"}), "aarch64"),
    ],
)
def test_products_of_integers_have_levels_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, machine: str, instructions: frozenset[str], level: str
) -> None:
    for each in prebuilt.LEVELS:
        for source, defines in prebuilt.libraries(each):
            path = tmp_path / each.name / prebuilt.file_name(source, defines)
            path.parent.mkdir(exist_ok=True)
            path.touch()
    monkeypatch.setattr(prebuilt, "FOLDER", tmp_path)
    monkeypatch.setattr(prebuilt, "_instructions", lambda: instructions)
    monkeypatch.setattr(prebuilt.platform, "machine", lambda: machine)
    found = prebuilt.find(prebuilt.SHARD / prebuilt.INTEGERS, ("BF16=1",))
    assert found is not None and found.parent.name == level
    other = prebuilt.find(attention.SOURCE, ("BF16=1", "PAIRED=1"))
    assert other is not None and "vnni" not in other.parent.name and "dotprod" not in other.parent.name


def test_every_library_of_a_level_is_of_an_existing_source() -> None:
    sources = {str(path.relative_to(prebuilt.SHARD)) for path in prebuilt.SHARD.rglob("*.c")}
    assert {source for source, _ in prebuilt.LIBRARIES} == sources


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_the_warning_names_the_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(prebuilt, "FOLDER", tmp_path)
    with pytest.raises(native.CompilerMissing, match=r"no C compiler .*: install gcc \(Debian, Ubuntu: apt-get"):
        native.library.__wrapped__(attention.SOURCE, "BF16=1", "PAIRED=1")


@needs_gcc
def test_a_machine_without_the_cross_compiler_builds_only_for_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prebuilt, "LIBRARIES", prebuilt.LIBRARIES[:1])
    foreign = prebuilt.Level("other", "sparc", (), frozenset())
    lines = prebuilt.build(tmp_path, [foreign, OWN[-1]])
    assert lines == ["no kernels for other: there is no gcc for sparc"]
    assert [path.parent.name for path in tmp_path.rglob("*.so")] == [OWN[-1].name]


@needs_gcc
def test_a_library_that_cannot_be_compiled_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prebuilt, "LIBRARIES", prebuilt.LIBRARIES[:1])
    level = prebuilt.Level("odd", OWN[0].machine, ("-march=none",), frozenset())
    (line,) = prebuilt.build(tmp_path, [level])
    assert line.startswith("no system.cores.so for odd: ") and "-march=" in line
    assert not list(tmp_path.rglob("*.so"))


@pytest.mark.long
@needs_gcc
@pytest.mark.skipif(not OWN, reason="needs a processor of a level")
def test_prebuilt_libraries_compute_the_same_bits(built: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    here = list(_results())
    monkeypatch.setattr(prebuilt, "FOLDER", built)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    native._log_level.cache_clear()
    with _fresh_libraries(monkeypatch, native.library.__wrapped__), capture_logs() as events:
        there = list(_results())
    assert [(event["event"], event["processor"]) for event in events] == [("prebuilt_kernels", OWN[0].name)]
    assert len(here) == len(there)
    for (name, ours), (_, theirs) in zip(here, there, strict=True):
        assert torch.equal(ours, theirs), name


class _fresh_libraries:
    """Within the block, every kernel is loaded anew by `load`, and forgotten after it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, load: Callable[..., ctypes.CDLL]) -> None:
        for module in (attention, products, targets, integer, float32):
            monkeypatch.setattr(module, "library", load)

    def __enter__(self) -> None:
        self._forget()

    def __exit__(self, *exception: object) -> None:
        self._forget()

    def _forget(self) -> None:
        of_products = (products._load, products.available, float32._load, float32.available, float32.block_size)
        for function in (*of_products, targets.compiled, targets.library_for, integer._load):
            function.cache_clear()


def _results() -> Iterator[tuple[str, torch.Tensor]]:
    """Outputs of every kernel."""
    for kind in ("float32", "bfloat16"):
        for name in ("grouped", "odd sizes", "soft cap", "sinks", "alibi"):
            spec, dtype = spec_of(name), KINDS[kind].dtype
            rows = random_rows(spec, 90, dtype, 3)
            yield f"attention {kind} {name}", Runner(KINDS[kind].backend(), spec, dtype).step([(0, PAGES, rows)])[0]
        yield f"adapters {kind}", _adapted(KINDS[kind].dtype)
        for bits in ("8 bits", "4 bits, groups of 32, minimums"):
            packed = integer.PackedIntegers(drawn(bits, 100, 256), None)
            yield f"integers {kind} {bits}", packed.product(rows_of(13, 256, KINDS[kind].dtype), with_bias=False)
    if products.available():
        yield from _products()
    if float32.available():
        yield from _float32()


def _adapted(dtype: torch.dtype) -> torch.Tensor:
    inputs = StepInputs(16, torch.device("cpu"))
    target, _ = make_target(130, 200, dtype, inputs)
    num_rows = fill(inputs, MIXES["some"], COUNTS)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(num_rows, 130, generator=generator).to(dtype)
    y = torch.randn(num_rows, 200, generator=generator).to(dtype)
    targets.adapt(target.rows, targets.Product(target, x, y))
    return y


def _products() -> Iterator[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(2)

    def draw(*shape: int) -> Any:
        return torch.randn(*shape, generator=generator).bfloat16()

    x, weight, up, down = draw(29, 96), draw(200, 96), draw(200, 96), draw(96, 200)
    packed, packed_up, packed_down = products.pack(weight), products.pack(up), products.pack(down)
    yield "linear", products.linear(x, packed, 200, draw(200).float())
    yield "gated_mlp", products.gated_mlp(x, packed, packed_up, 200, packed_down, 96)
    yield "gate_times", products.gate_times(draw(9, 64), draw(9, 64))
    norm_weight = draw(96)
    yield "rms_norm", products.rms_norm(x, products.RmsNorm.of(norm_weight, 1e-5, 0.0, True))
    rotated = draw(7, 128)
    products.rotate(rotated, 2, draw(7, 64), draw(7, 64))
    yield "rotate", rotated


def _float32() -> Iterator[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(4)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    x, weight, bias = draw(29, 96), draw(200, 96), draw(200)
    packed = float32.pack(weight)
    for is_gelu in (False, True):
        yield f"float32 {is_gelu=}", float32.linear(x, packed, 200, bias, is_gelu)
    yield "gelu", float32.gelu(draw(9, 65))
    yield "layer_norm", float32.layer_norm(x, draw(29, 96), draw(96), draw(96), 1e-5)
