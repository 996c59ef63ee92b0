"""The tensors of one step: inputs, padding, adapter row groups, and copies between host and device."""
