"""Faults of integer weights: compiled matrix products, quantization at load, `.gguf` files."""

from tests.mutants.mutant import Mutant

PRODUCTS = "tests/shard/model/kernels/test_integer.py"
ROUNDING = "tests/shard/model/quantization/test_integers.py"
GGUF = "tests/shard/model/gguf"

MUTANTS = [
    Mutant(
        "activations are truncated instead of rounded",
        "shard/model/kernels/integer.h",
        "(int8_t)(int32_t)rintf(",
        "(int8_t)(int32_t)truncf(",
        f"{PRODUCTS}::test_the_bits_of_the_reference",
    ),
    Mutant(
        "every group of weights uses the activation sum of the first group",
        "shard/model/kernels/integer.h",
        "(first_row.offsets + g)",
        "(first_row.offsets)",
        f"{PRODUCTS}::test_the_bits_of_the_reference",
    ),
    Mutant(
        "scales whose first row half precision holds are all rounded to it",
        "shard/model/kernels/integer.py",
        "if has_halves and not _holds_halves(part):",
        "if not has_halves and _holds_halves(part):",
        f"{PRODUCTS}::test_scales_of_which_half_precision_holds_the_first",
    ),
    Mutant(
        "products of 6 bits are added as often as those of 5",
        "shard/model/kernels/integer.h",
        "return high - low > 31 || group < BLOCK ? MIDDLE : LOW;",
        "return group < BLOCK ? MIDDLE : LOW;",
        f"{PRODUCTS}::test_the_bits_of_the_reference",
    ),
    Mutant(
        "a row with NaN or infinity gives zeros instead of NaN",
        "shard/model/kernels/integer.h",
        "!is_finite ? NAN : is_zero ? 0",
        "!is_finite || is_zero ? 0",
        f"{PRODUCTS}::test_odd_rows",
    ),
    Mutant(
        "scales of 4-bit groups that are tried later win even if they are worse",
        "shard/model/quantization/integers.py",
        "is_better = error < least",
        "is_better = error <= torch.inf",
        f"{ROUNDING}::test_four_bits_are_nearer_than_between_the_extremes",
    ),
    Mutant(
        "the output head is rounded to 4 bits instead of 8",
        "shard/model/quantization/integers.py",
        "of_head if module is output else rounding",
        "rounding",
        f"{ROUNDING}::test_what_is_rounded[int4]",
    ),
    Mutant(
        "6-bit scales lose their upper two bits",
        "shard/model/gguf/blocks.py",
        "third & 15 | first >> 6 << 4",
        "third & 15",
        f"{GGUF}/test_blocks.py::test_values_are_those_of_the_package[Q4_K]",
    ),
    Mutant(
        "rows of the q and k projections keep the order of the .gguf file",
        "shard/model/gguf/network.py",
        "return None if np.array_equal(order, numbers) else order[:, 0].long()",
        "return None",
        f"{GGUF}/test_network.py::test_tokens_are_those_of_the_values_in_the_file[Q8_0]",
    ),
    Mutant(
        "values of 5 bits lose the fifth",
        "shard/model/gguf/blocks.py",
        "_nibbles(blocks[..., 6:]) | _bits(blocks[..., 2:6]) << 4",
        "_nibbles(blocks[..., 6:])",
        f"{GGUF}/test_blocks.py::test_values_are_those_of_the_package[Q5_0]",
    ),
    Mutant(
        "tensors of a .gguf file may overlap",
        "proto/gguf/header.py",
        "if place.offset < end:",
        "if place.offset < 0:",
        f"{GGUF}/test_header.py::test_what_is_refused",
    ),
    Mutant(
        "counts in the header of a .gguf file are believed",
        "proto/gguf/header.py",
        "if count * num_bytes > self.num_bytes - self._at:",
        "if count < 0:",
        f"{GGUF}/test_header.py::test_what_is_refused",
    ),
    Mutant(
        "all parts of a stored weight are packed over the first",
        "shard/model/kernels/integer.py",
        "code.pack(ctypes.byref(self._matrix), start, ",
        "code.pack(ctypes.byref(self._matrix), 0, ",
        f"{GGUF}/test_blocks.py::test_a_weight_in_parts_is_packed_as_a_whole",
    ),
    Mutant(
        "the first layer of each pattern has full attention instead of the last one",
        "shard/model/gguf/configuration.py",
        "bool((layer + 1) % pattern)",
        "bool(layer % pattern)",
        f"{GGUF}/test_configuration.py::test_the_texts_of_the_original_model[gemma 3]",
    ),
    Mutant(
        "the eot and eom tokens of a .gguf file do not end an output",
        "shard/model/gguf/tokenizer.py",
        'for name in ("eos", "eot", "eom")]',
        'for name in ("eos",)]',
        f"{GGUF}/test_tokenizer.py::test_every_token_that_ends_an_answer_is_named",
    ),
]
