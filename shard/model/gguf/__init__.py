"""Models in a single `.gguf` file, read with the package `gguf` and transformers' tables of names."""
