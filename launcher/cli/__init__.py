"""Command-line clients of a running server, and the Python client."""
