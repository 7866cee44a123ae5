"""Ray clusters: joining one, starting one on this machine, and watching it."""
