"""What grammars cost, and what they gain: steps, first tokens, other requests, forced tokens, and a peer."""
