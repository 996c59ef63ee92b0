"""The wire contract between router and shard: one .proto file and the stubs generated from it.

Knows messages and rpcs only. Imports nothing of ours. `make proto` regenerates; a test compares.
"""
