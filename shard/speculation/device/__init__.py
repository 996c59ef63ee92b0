"""Drafts that the device makes, without the host."""
