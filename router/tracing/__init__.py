"""OpenTelemetry traces of requests, exported over OTLP."""
