"""`strata bench train`: the same model, batch, data and steps through our training and through loops that owe us nothing.

`contest.py` says what everybody is given, `compare.py` lets the contenders take turns, `launch.py` starts one of them in
processes of its own and `report.py` shows the outcome. `peer.py` is what such a process runs: the loop in `bare.py` around
one of the models in `models.py`, or our own loop without Ray (`ours.py`).
"""
