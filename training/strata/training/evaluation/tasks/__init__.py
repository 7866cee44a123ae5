"""Tasks that come with Strata, for lm-evaluation-harness. They need no network."""
