"""Quantized base weights."""
