"""`strata bench speculative`: an endpoint with and without speculative decoding."""
