"""The cost of adapters: throughput, waiting times, fairness, memory."""
