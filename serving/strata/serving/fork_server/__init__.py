"""Fork server that starts engine replicas in seconds, from a process that has imported vLLM.

Importing vLLM takes 10 to 20 s of one core, and an engine needs it twice: in the replica's process and in its own. On one
machine without GPUs, `server.py` imports it once, while Ray starts. Ray runs `launch.py` in place of the Python interpreter; it
requests a fork from the server, which becomes Ray's worker. `vllm_patches/preforked_engine.py` forks the engine's process from
there, before Ray's threads exist. Without a server everything starts as usual.
"""
