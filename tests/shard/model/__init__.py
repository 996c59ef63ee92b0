"""Tests of shard/model/."""
