"""One module for each model family, with its `FAMILY`."""
