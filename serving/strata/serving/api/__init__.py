"""The OpenAI-compatible API: validation, limits, errors, and the schema."""
