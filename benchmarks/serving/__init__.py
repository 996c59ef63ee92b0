"""The throughput and latency of a whole server, and the limits of the machine it runs on."""
