"""Speculative decoding: tokens per step, the cost of drafts, schedules, and the tables that other systems publish."""
