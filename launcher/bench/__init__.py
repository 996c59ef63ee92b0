"""`lorikeet-bench`: load for a server, and what the load measured."""
