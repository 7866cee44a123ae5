"""Logs of a run's workers on the run's storage: capture, copying by a separate process, and `strata logs`."""
