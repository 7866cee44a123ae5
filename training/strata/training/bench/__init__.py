"""`strata bench train`: Strata's training and independent loops on the same model, batch, data and steps.

`contest.py` defines the job of a contender, `compare.py` alternates between the contenders, `launch.py` starts a contender in
separate processes and `report.py` prints the result. Each process runs `peer.py`: the loop in `bare.py` around a model from
`models.py`, or Strata's loop without Ray (`ours.py`).
"""
