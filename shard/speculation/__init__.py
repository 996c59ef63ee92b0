"""Speculative decoding: one file per source of draft tokens, how many a step verifies, and what they cost."""
