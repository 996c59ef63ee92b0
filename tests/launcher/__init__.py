"""Tests of launcher/."""
