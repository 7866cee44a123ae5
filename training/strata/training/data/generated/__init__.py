"""Data sets that the repository generates: conversations, preference pairs and completions, from a seed and without files."""
