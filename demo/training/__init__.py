"""`python -m lorikeet.demo.training WHAT` trains the built-in demo models."""
