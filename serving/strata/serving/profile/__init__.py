"""`strata profile serve`: traces of engines under load, their analysis, and findings."""
