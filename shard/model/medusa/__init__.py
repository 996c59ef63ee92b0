"""Medusa heads in the forward pass."""
