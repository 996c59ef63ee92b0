"""Exactness on a CUDA device, marked `gpu`; the same with tiny shapes on CPU, marked `device`."""
