"""The HTTP application: routes, middleware, request headers and server-sent events."""
