"""Tests of benchmarks/evidence and of what is published."""
