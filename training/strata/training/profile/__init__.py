"""`strata profile`: traces of chosen steps, their analysis, and findings."""
