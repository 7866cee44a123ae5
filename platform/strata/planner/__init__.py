"""Costs of a parallel layout before anyone pays for it: memory, bytes, time and money, from the model's shape and the hardware's
figures alone. No torch, no GPU.

`catalogue/` holds models, GPUs and fabrics; `layout.py` is how a run is divided over GPUs. `memory/`, `collectives/`, `pipeline/`
and `step/` are the cost models, which `plan.py` puts together for one layout and `search/` for many. `reliability/` and
`serving/` answer what comes after, `validation/` holds all of it against published figures, `cli/` has the commands. Every
figure is a line of a `worksheet.py`.
"""
