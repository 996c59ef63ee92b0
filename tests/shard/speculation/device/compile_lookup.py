"""Compiles prompt lookup for Hopper, without a device. Run by test_lookup.py."""

from tests.shard.sampling.compile_triton import check

if __name__ == "__main__":
    check("prompt lookup")
