"""Usage and audit logs: a record of every ended request for the operator's file or URL, without delaying requests."""
