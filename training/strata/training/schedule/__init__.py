"""Schedules of a run: learning rate, time budget and early stop."""
