"""Prometheus metrics of the router."""
