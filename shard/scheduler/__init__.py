"""Which tokens of which requests the next step computes, and the KV pages and adapter slots they use. No torch."""
