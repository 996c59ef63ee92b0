"""How long streams pause when a shard ends, hangs or is replaced."""
