"""Between text and token ids: tokenizing, chat templates, incremental detokenization, stop strings. Knows no HTTP."""
