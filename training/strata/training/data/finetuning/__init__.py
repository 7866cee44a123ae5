"""Fine-tuning data: examples, chat templates, loss masks, packed rows, and the mixed order of several sets."""
