"""Suspect nodes that a run avoids.

Nodes become suspect by a corrupted replica (`corruption.py`, in the workers), or by repeated hangs and slow ranks (`suspects.py`,
in the driver). Each has a file in the run's folder, so that later starts know it. Before each start, the controller selects the
nodes of the workers (`placement.py`). Ray places a worker on any free GPU of a node, so a whole node is excluded.
"""
