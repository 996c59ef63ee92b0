"""Medusa heads: reading and writing their files, computing with them, and training them for one's own adapter."""
