"""The model, its operations, and its Hugging Face names."""
