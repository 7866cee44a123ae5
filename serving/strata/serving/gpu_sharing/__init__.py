"""Engines that share a GPU and start at the same time.

vLLM measures an engine's memory by the free memory of the whole GPU, so two engines could only start one after the other. Here
the memory is divided beforehand (`claims.py`), and each engine counts only its own allocations (`own_memory.py`). `worker.py` is
vLLM's worker with both, and with the size of the KV cache from an earlier start (`kv_sizes.py`).
"""
