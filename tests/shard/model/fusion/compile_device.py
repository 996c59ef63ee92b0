"""Compiles norms, gates and rotary positions for a GPU that need not be here and looks at the instructions. Run by
test_cuda_parts.py.
"""

import re
import subprocess
import tempfile

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lorikeet.shard.model.kernels import triton as kernels

WIDTH, HEAD = 4096, 128
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
    "STORES": False,
}


def instructions(kernel: triton.JITFunction, constants: dict[str, object], num_warps: int, unaligned: str = "") -> str:
    """PTX for Hopper, every address and count a multiple of 16 but for those in `unaligned`; nothing spills."""
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else TYPES.get(name, "i32") for name in names}
    free = {"epsilon", *unaligned.split()}
    aligned = [i for i, name in enumerate(names) if name not in constants and name not in free]
    source = ASTSource(kernel, signature, constants, {(i,): [["tt.divisibility", 16]] for i in aligned})
    options = {"num_warps": num_warps, **kernels.FIXED}
    asm = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        used = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert re.search(r"STACK:0 .*LOCAL:0 ", used), f"registers ran out: {used}"
    text: str = asm["ptx"]
    return text


def count(text: str, instruction: str) -> int:
    return sum(instruction in line for line in text.splitlines())


def main() -> None:
    warps = kernels.num_warps(WIDTH)
    norm, add_norm = (instructions(kernels.norm_rows, NORM | {"ADDS": adds}, warps) for adds in (False, True))
    # x, what is added and the weight, each in so many pieces of 16 bytes a thread
    pieces = WIDTH // (32 * warps * 8)
    assert count(norm, "ld.global.v4.b32") == count(norm, "ld.global") == 2 * pieces
    assert count(add_norm, "ld.global.v4.b32") == count(add_norm, "ld.global") == 3 * pieces
    assert count(norm, "st.global.v4.b32") == pieces and count(add_norm, "st.global.v4.b32") == 2 * pieces
    for is_tanh in (False, True):  # 14336 hidden numbers are 14 blocks
        text = instructions(kernels.gate_rows, {"BLOCK": kernels.GATE_BLOCK, "IS_TANH": is_tanh}, 4)
        assert count(text, "ld.global.v4.b32") == count(text, "ld.global") == 2
        assert count(text, "st.global.v4.b32") == 1
    for norms in (False, True):
        text = instructions(kernels.rotate_heads, ROTARY | {"NORMS": norms}, 2, "num_heads num_rotated")
        # both halves of eight heads; the angles of a row are few
        assert count(text, "ld.global.v4.b32") == 2
        assert count(text, "st.global.v4.b32") == count(text, "st.global") == 2


if __name__ == "__main__":
    main()
