"""Ray Serve LLM, started as its documentation does, in its own Ray cluster, until SIGTERM.

Run as `python -m strata.serving.bench.contenders.ray_llm JOB`.
JOB is JSON: `host`, `port` and `configs`, a list of the `LLMConfig` of one engine, or of a prefill and a decode engine.
"""

import json
import os
import signal
import sys
from types import FrameType
from typing import Any

import ray
from ray import serve

# Ray schedules the engines, two ingress replicas and the proxy. On a small machine it is offered more CPUs than there are.
LEAST_CPUS = 8
APP = "peer"


def main(job: dict[str, Any]) -> None:
    ray.init(
        address="local",
        num_cpus=max(os.cpu_count() or 1, LEAST_CPUS),
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=256 * 2**20,
        _temp_dir=f"/tmp/strata-ray-{os.getuid()}",  # short, for there are sockets in it
    )
    for number in (signal.SIGINT, signal.SIGTERM):  # after ray.init, which sets its own
        signal.signal(number, _leave)
    try:
        serve.start(http_options={"host": job["host"], "port": job["port"]})
        serve.run(_app(job["configs"]), name=APP)
        print("serving", flush=True)
        signal.pause()
    finally:
        _print_status()
        ray.shutdown()


def _app(configs: list[dict[str, Any]]) -> serve.Application:
    from ray.serve.llm import LLMConfig, build_openai_app, build_pd_openai_app

    made = [LLMConfig(**config) for config in configs]
    if len(made) == 1:
        return build_openai_app({"llm_configs": made})
    prefill, decode = made
    return build_pd_openai_app({"prefill_config": prefill, "decode_config": decode})


def _leave(signum: int, frame: FrameType | None) -> None:
    sys.exit(0)


def _print_status() -> None:
    """Prints Serve's status, the only place with a replica's error."""
    for name, application in serve.status().applications.items():
        print(name, application.status, application.message)
        for deployment, state in application.deployments.items():
            print(deployment, state.status, state.message, flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
