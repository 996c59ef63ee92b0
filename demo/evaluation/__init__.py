"""`python -m lorikeet.demo.evaluation WHAT` measures the built-in demo models."""
