"""Tests of shard/attention/."""
