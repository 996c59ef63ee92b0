"""Compiles norms, gates and rotary positions for a GPU that need not be here and looks at the instructions. Run by
test_device_parts.py.
"""

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from shard.model import device_kernels as kernels

WIDTH, HIDDEN, HEAD = 4096, 14336, 128
ADDRESSES = ("x", "added", "weight", "sums", "y", "cos", "sin", "q_weight", "k_weight")
TYPES = dict.fromkeys(ADDRESSES, "*bf16") | {"epsilon": "fp32"}
NORM = {"BLOCK": WIDTH, "OFFSET": 0.0, "ROUNDS": True}
ROTARY = {
    "DIM": HEAD,
    "WIDTH": HEAD,
    "HALF": HEAD // 2,
    "TAIL": 1,
    "HEADS": kernels.HEADS,
    "OFFSET": 0.0,
    "ROUNDS": True,
}


def instructions(kernel: triton.JITFunction, constants: dict[str, object], num_warps: int, unaligned: str = "") -> str:
    """PTX for Hopper, every address and count a multiple of 16 but for those in `unaligned`."""
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else TYPES.get(name, "i32") for name in names}
    free = {"epsilon", *unaligned.split()}
    aligned = [i for i, name in enumerate(names) if name not in constants and name not in free]
    source = ASTSource(kernel, signature, constants, {(i,): [["tt.divisibility", 16]] for i in aligned})
    options = {"num_warps": num_warps, "enable_fp_fusion": False}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]


def count(text: str, instruction: str) -> int:
    return sum(instruction in line for line in text.splitlines())


def main() -> None:
    warps = kernels.num_warps(WIDTH)
    norm = instructions(kernels.norm_rows, NORM | {"ADDS": False}, warps)
    add_norm = instructions(kernels.norm_rows, NORM | {"ADDS": True}, warps)
    gates = [
        instructions(kernels.gate_rows, {"BLOCK": kernels.GATE_BLOCK, "IS_TANH": is_tanh}, 4) for is_tanh in (0, 1)
    ]
    turns = [
        instructions(kernels.rotate_heads, ROTARY | {"NORMS": norms}, 2, "num_heads num_turned") for norms in (0, 1)
    ]
    for text in (norm, add_norm, *gates, *turns):
        assert ".local" not in text, "registers ran out"
        assert "ld.global.v4.b32" in text and "st.global.v4.b32" in text
    # x, twice x and the weight, each in 4096 / (32 * warps * 8) pieces of 16 bytes a thread
    pieces = WIDTH // (32 * warps * 8)
    assert count(norm, "ld.global") == 2 * pieces and count(norm, "st.global") == pieces
    assert count(add_norm, "ld.global") == 3 * pieces and count(add_norm, "st.global") == 2 * pieces
    for text in gates:
        assert count(text, "ld.global") == 2 and count(text, "st.global") == 1
    for text in turns:
        assert count(text, "ld.global.v4") == 2 and count(text, "st.global") == 2


if __name__ == "__main__":
    main()
