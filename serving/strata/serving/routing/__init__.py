"""Where a request is prefilled, and how much of its prompt is cached."""
