"""Models that compute vectors or labels: transformers' code over one flat row, and what follows it."""
