"""Published figures: their definitions, how they follow from raw values, and their results."""
