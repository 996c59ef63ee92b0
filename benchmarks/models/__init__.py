"""Random models, adapters for them, prompts in their tokens, and an engine around them in this process."""
