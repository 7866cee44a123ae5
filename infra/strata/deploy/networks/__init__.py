"""Networks between nodes: machines that have them, their pods, placement of the pods, and a measurement before training."""
