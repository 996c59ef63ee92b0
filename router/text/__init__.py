"""Text and token ids: tokenizing, chat templates, incremental detokenization, stop strings."""
