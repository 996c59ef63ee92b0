"""Receipts: records from which an output can be reproduced and verified."""
