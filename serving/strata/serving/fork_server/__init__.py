"""Engines that start in seconds: replicas are forked from a process that has imported vLLM.

An import of vLLM costs 10 to 20 s of one core, and an engine needs it twice, in the replica's process and in the engine's own.
On one machine without GPUs, `server.py` imports it once, when Ray is up. `launch.py` is what Ray runs in place of the Python
interpreter: it has the server fork a process and become Ray's worker in it. `engine/preforked.py` forks the engine's process from
there, before Ray's threads exist. Without a server everything starts as usual.
"""
