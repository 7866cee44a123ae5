"""`strata chaos`: fault injection. Kills replicas under load and compares every answer with an undisturbed run."""
