"""Tests of speculative decoding apart from requests."""
