"""Parts of the start of an endpoint or a model: first requests, progress and deadline, why it failed."""
