"""The trainer of Medusa heads that a shard starts: it trains on rows in the shard's memory and writes served files."""
