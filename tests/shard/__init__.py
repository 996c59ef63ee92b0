"""Tests of shard/."""
