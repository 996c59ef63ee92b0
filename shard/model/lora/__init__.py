"""LoRA in the forward pass: target modules, kernels and the memory that holds adapter weights.

`targets.py` writes an adapter's rank and the addresses of its factors into the entry of its slot; `targets.c` (CPU) and
`triton.py` (CUDA) read them there for each row.
"""
