"""Readers of conversations: messages and tools."""
