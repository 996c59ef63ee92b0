"""LoRA in the forward pass: target modules, kernels and the memory that holds adapter weights."""
