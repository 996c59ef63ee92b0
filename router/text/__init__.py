"""Text and token ids: tokenizing, grammars, incremental detokenization, stop strings."""
