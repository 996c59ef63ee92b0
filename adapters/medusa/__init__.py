"""Medusa heads: reads and writes their files, computes with them, and trains them for a model or adapter."""
