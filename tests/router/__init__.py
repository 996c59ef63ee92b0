"""Tests of router/."""
