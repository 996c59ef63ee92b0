"""Speed and correctness at full size: what README claims, reproducible."""
