"""`strata bench serve`: our endpoint beside bare vLLM and Ray Serve LLM, on the same model, machine and load."""
