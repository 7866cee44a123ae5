"""Free resources and drain notices of Ray's nodes.

Written for: Ray 2.60 (`ray/_private/state.py`).
Reason: Ray's public API has the free resources of the whole cluster only, and no drain notices. A worker needs its CPUs and GPU
on one node, and a node that will be taken away is no capacity.
Delete when: `ray.nodes()` includes the free resources of each node and whether it is being drained.
"""

from ray._private import state


def free_resources() -> dict[str, dict[str, float]]:
    """Free resources by node id."""
    found: dict[str, dict[str, float]] = state.available_resources_per_node()
    return found


def draining() -> frozenset[str]:
    """Ids of the nodes with a drain notice: a preemption, a reclaimed spot instance, or `ray drain-node`."""
    return frozenset(state.state.get_draining_nodes())
