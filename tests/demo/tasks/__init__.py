"""Tests of demo/tasks/."""
