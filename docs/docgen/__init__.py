"""Generator of the tables and references under docs/ and in README.md.

`make docs` runs it. `results.py` fills the blocks between markers from the benchmark runs in `docs/results/data`;
`reference.py` writes `docs/reference` from the recipe models, the command line and the metric catalogue.
"""
