"""`strata top`: live view of machine, training runs and endpoint in the terminal."""
