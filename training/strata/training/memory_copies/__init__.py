"""Copies of the training state in host memory, from which a run continues after a lost worker without reading storage.

After a step, each rank copies its fragments to a file on tmpfs (`copier.py`, `copy_file.py`). The file outlives the process, so
restarted workers load it through the reader of checkpoints, in the same or another layout (`recovery.py`). With several nodes,
each copy is also sent to a holder on another node (`peers.py`). The driver and the holders own the folders of the copies
(`folders.py`) and remove them.
"""
