"""Servers under load: their processes, the requests they are sent, and the peers they are compared with."""
