"""Elastic runs: a range of workers, of which a run uses as many as the cluster has capacity for.

The driver runs attempts. An attempt is one Ray Train `fit` in a fixed layout. It ends when workers are lost, or when the driver
requests a resize, for which the workers save a checkpoint. The next attempt continues in the best layout for the capacity that
is left. The global batch and the data order do not depend on the layout, so the losses do not either, up to rounding.

Ray Train's own elastic mode does not fit: it selects any number of workers, without a layout for it, and resizes by killing
workers, without a checkpoint before.
"""
