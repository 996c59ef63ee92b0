"""Tests of shard/ranks/."""
