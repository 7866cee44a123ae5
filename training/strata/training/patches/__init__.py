"""Patches of Ray Train and torch. Each module names the version it was written for, the reason, and when to delete it; its test
in `tests/training/patches` fails when upstream has changed or no longer needs it."""
