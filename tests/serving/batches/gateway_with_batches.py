"""A gateway with files and batches in a process of its own, and a stand-in engine in another.

With the tests' folder on PYTHONPATH:

    python gateway_with_batches.py engine '{}'
    python gateway_with_batches.py gateway '{"replica": "127.0.0.1:1234", "folder": "/tmp/x", "keys": null, "port": 0}'

Each prints the port it listens on. The engine answers with the prompt in capitals, and counts how often it saw each prompt.
"""

import asyncio
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from gateway_alone import SECRET, Directory, replica, run, serve

from strata.platform import recipe_file
from strata.serving.gateway.admission import Admission
from strata.serving.gateway.app import App
from strata.serving.gateway.keys import Keys
from strata.serving.gateway.pool import Pool, Pools
from strata.serving.metrics.telemetry import Gateway as Telemetry
from strata.serving.runtime import batching
from strata.serving.spec import GatewaySpec, Network
from strata.serving.tenants.gate import Gate
from strata.serving.transport.link import Call
from strata.serving.transport.peers import Peers


class Engine:
    """Answers after the `seconds` of a request's body, with the statuses of its `fail` first."""

    def __init__(self) -> None:
        self.seen = Counter[str]()
        self.running = self.most = 0

    async def handle(self, call: Call) -> None:
        asked = json.loads(call.body)
        if call.method == "tokenize":  # how a test reads the counters
            self._answer(call, 200, {"seen": self.seen, "most": self.most})
            self.most = self.running
            return
        prompt = asked["prompt"]
        self.seen[prompt] += 1
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(asked.get("seconds", 0))
        finally:
            self.running -= 1
        statuses = asked.get("fail", [])
        if self.seen[prompt] <= len(statuses):
            self._answer(call, statuses[self.seen[prompt] - 1], {"error": {"message": "failed as wanted"}})
        else:
            self._answer(call, 200, {"object": "text_completion", "choices": [{"text": prompt.upper()}]})

    def _answer(self, call: Call, status: int, tree: Any) -> None:
        call.head({"status": status, "type": "application/json", "headers": {}})
        call.data(json.dumps(tree).encode())
        call.end({"prompt_tokens": 3, "tokens": 1, "queued_s": 0.0})


async def gateway(settings: dict[str, Any]) -> None:
    words = [f"serve.files.folder={settings['folder']}", "serve.max_sequences=8", *settings.get("words", [])]
    spec = GatewaySpec.of(recipe_file.load("laptop", words).serve, "tiny", Network("127.0.0.1", SECRET))
    directory: Any = Directory(settings["replica"])
    decode, others = Peers(directory, "decode", SECRET), Peers(directory, "gateway", SECRET)
    keys = Keys(Path(settings["keys"])) if settings.get("keys") else None
    gate = Gate(lambda: 8, 16, SECRET, keys.lend_idle) if keys is not None else None
    main = Pool(("tiny",), decode, None, Admission(lambda: 24), Telemetry("tiny", "g"))
    pools = Pools(main)
    app = App("g", pools, others, keys, "here", gate=gate, batches=batching.api(spec))
    batches = batching.executor(spec, app, keys, pools, others, "g")
    assert batches is not None
    batches.start()
    await serve(app, main, settings.get("port", 0))
    await batches.stop()


if __name__ == "__main__":
    chosen, given = sys.argv[1], json.loads(sys.argv[2])
    run(replica(Engine()) if chosen == "engine" else gateway(given))
