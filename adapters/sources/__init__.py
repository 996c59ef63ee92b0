"""Where adapters come from: one module per source, all of the shape in `base`. Imports no torch."""
