"""From a model's or adapter's name to files and checked tensors. This half imports no torch."""
