"""Models and files that a server needs before it starts: hub downloads, adapters, devices."""
