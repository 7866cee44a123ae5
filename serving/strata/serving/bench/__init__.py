"""`strata bench serve`: compares Strata, bare vLLM and Ray Serve LLM on the same model, machine and load."""
