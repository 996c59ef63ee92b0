"""Published figures: their definitions, how they follow from raw values, the code they depend on, and their results."""
