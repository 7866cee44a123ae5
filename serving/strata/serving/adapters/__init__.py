"""LoRA adapters that are loaded and removed while their base model is served."""
