"""A real decode engine in a process of its own, without Ray.

    python engine_alone.py MODEL_FOLDER

Prints the port on which it answers the calls of gateways.
"""

import asyncio
import os
import sys
from pathlib import Path

from strata.platform import recipe_file
from strata.serving.spec import EngineSpec, Network
from strata.serving.transport.link import SECRET_BYTES, Server

SECRET = b"x" * SECRET_BYTES
WORDS = ["serve.prefill.replicas=0", "serve.max_sequences=8", "serve.engine={max_model_len: 512}"]


async def serve(folder: Path) -> None:
    spec = EngineSpec.of("decode", recipe_file.load("laptop", WORDS).serve, folder, "tiny", Network("127.0.0.1", SECRET))
    os.environ.update(spec.environment())
    from strata.serving.engine import engine

    started = await engine.start(spec, "replica", "127.0.0.1")
    calls = engine.decode_calls(started, spec, None)
    server = Server(calls.handle, lambda: {"calls": server.calls, "healthy": started.healthy}, SECRET)
    address = await server.listen("127.0.0.1")
    print(f"port {address.rpartition(':')[2]}", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1])))
