"""Matrix kernels for CPU (C) and CUDA (Triton), and their tuning tables."""
