"""`strata top`: machine, runs and endpoint in the terminal."""
