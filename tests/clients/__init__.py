"""Published clients, each in a virtual environment of its own, against a server of the demo model."""
