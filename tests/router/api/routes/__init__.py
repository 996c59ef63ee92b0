"""Tests of the HTTP routes with the real application, dispatcher and gRPC, and a scripted shard."""
