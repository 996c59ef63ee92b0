"""The embedded default model and the scripts that made it.

Knows nothing of serving: no part of the server imports this package.
"""
