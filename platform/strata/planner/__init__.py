"""What a layout costs before anyone pays for it: memory, bytes, time and money, from the model's shape and the hardware's
figures alone. No torch, no GPU.

`shape.py` is the model, `hardware.py` GPUs and fabrics, `layout.py` how a run is cut. From them follow `memory.py`,
`compute.py` and `communication.py`, which `step.py` puts together along one of the `schedules.py`; `search.py` compares
layouts. `failures.py` and `serving.py` answer what comes after. Every figure is a line of a `sheet.py`.
"""
