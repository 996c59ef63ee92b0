"""Answers that are kept for a while, so that a client that lost its connection reads the rest on another one."""
