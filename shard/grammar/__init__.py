"""Grammars that constrain outputs: compiled in threads by llguidance, and applied to logits as masks."""
