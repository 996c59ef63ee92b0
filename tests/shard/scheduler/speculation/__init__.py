"""Tests of what guesses ahead."""
