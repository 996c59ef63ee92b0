"""The state of one request in the router, from its submission to its last token."""
