"""The training data of the built-in demo models: corpus, tokenizer and adapter tasks."""
