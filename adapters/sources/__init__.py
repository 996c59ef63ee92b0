"""Sources of adapters: one module per source, all of the shape in `base`. Imports no torch."""
