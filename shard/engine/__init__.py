"""The step loop: schedule, forward, sample, commit."""
