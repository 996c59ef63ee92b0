"""Tests of demo/data/tasks/."""
