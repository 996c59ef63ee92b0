"""What the processes of a server agree on: the wire and its version, digests, names of quantization methods,
configuration files, log format, and what happens when a parent process ends. Imports no other package of ours.

`shard.proto` is the wire; `make proto` generates the stubs, and a test compares them.
"""
