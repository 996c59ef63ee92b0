"""Whole servers at full size, marked `long`: hostile input, faults, receipts, tenants, losslessness, a soak run."""
