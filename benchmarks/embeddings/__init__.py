"""Embedding models: texts per second next to sentence-transformers and infinity."""
