"""The demo of SmolLM2-135M-Instruct: its adapters, the examples that they were trained on, and their scores."""
