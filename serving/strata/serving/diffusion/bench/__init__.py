"""`strata bench dit`: pictures per layout on CPUs, and full-size models and their attention on one GPU, beside diffusers."""
