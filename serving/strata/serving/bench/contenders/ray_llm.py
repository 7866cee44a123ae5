"""Ray Serve LLM as its documentation starts it, in a Ray of its own, until SIGTERM.

Run as `python -m strata.serving.bench.contenders.ray_llm JOB`.
JOB is JSON: `host`, `port` and `configs`, the `LLMConfig` of one engine, or those of a prefill and a decode engine.
"""

import json
import os
import signal
import sys
from types import FrameType
from typing import Any

import ray
from ray import serve

# What Ray schedules here: the engines, two ingress replicas, the proxy. A small machine offers more CPUs than it has.
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
    for number in (signal.SIGINT, signal.SIGTERM):  # now, for Ray sets its own when it starts
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
    """A replica's error is told in the status alone."""
    for name, application in serve.status().applications.items():
        print(name, application.status, application.message)
        for deployment, state in application.deployments.items():
            print(deployment, state.status, state.message, flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
