"""The tasks of the demo adapters: one module per task."""
