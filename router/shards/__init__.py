"""The shards of one router: membership, connections, credit, choice of a shard, and the wire messages."""
