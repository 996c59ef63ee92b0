"""One model on one device group: pages, slots, steps, sampling. Token ids only; no text, no HTTP."""
