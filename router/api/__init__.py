"""The HTTP application: middleware, request headers, routes, answers and server-sent events."""
