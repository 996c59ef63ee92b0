"""What the adapters can do: one module per task."""
