"""The state of one request in the router, from admission to its last token."""
