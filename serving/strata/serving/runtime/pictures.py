"""Life of a picture endpoint on a Ray cluster: checks, start, a first picture, and a stop that lets requests end."""

import asyncio
import json
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from strata.planner.diffusion.layout_rules import Splittable
from strata.planner.diffusion.layout_rules import check as check_layout
from strata.platform import ports
from strata.platform.errors import UserError
from strata.platform.hardware.machine import available_memory
from strata.platform.ray_cluster import cluster
from strata.platform.recipe import ServeSection
from strata.serving import access, client
from strata.serving.diffusion.replica import spec as settings
from strata.serving.diffusion.replica.spec import PicturesSpec
from strata.serving.gateway import readiness
from strata.serving.models import model_dir
from strata.serving.runtime import endpoint
from strata.serving.runtime.endpoint import SPARE_CPUS, Endpoint
from strata.serving.runtime.models.checks import PROCESS_GIB
from strata.serving.runtime.start import failures
from strata.serving.runtime.start.progress import DEFAULT_LIMIT_S, LOOK_S, Report, StartProgress, shown
from strata.serving.spec import Network
from strata.serving.transport.directory import Directory

ROUTE = "/v1/images/generations"
FIRST = {"prompt": "0", "steps": 1}  # also the name of a class, for models of classes


def check(section: ServeSection, folder: Path) -> None:
    """Raises UserError for every problem that can be found before a process starts."""
    access.require_safe(section)
    model_dir.check_pictures(folder)
    _check_layout(section, folder)
    ports.require_free(section.port, section.host, "serve.port")
    if section.device == "cpu":
        needed = section.pictures.replicas * section.pictures.workers * (PROCESS_GIB + model_dir.weights_gib(folder))
        free = available_memory() / 2**30
        if free < needed:
            raise UserError(
                f"Serving this model needs about {needed:.1f} GiB of memory; {free:.1f} are free.",
                "Close something, serve a smaller model, or use fewer workers (serve.pictures).",
            )


def _check_layout(section: ServeSection, folder: Path) -> None:
    """Refuses layouts that no model or this one does not allow. The workers check the number of blocks and tokens too."""
    layout = settings.layout(section.pictures)
    try:
        heads = json.loads((folder / "transformer" / "config.json").read_text()).get("num_attention_heads")
    except (OSError, ValueError):
        heads = None
    any_number = layout.workers  # divisible by and as large as every degree
    check_layout(layout, Splittable(heads if isinstance(heads, int) else any_number, any_number, any_number, two_passes=True))


@contextmanager
def running(
    section: ServeSection, folder: Path, model_id: str, report: Report = lambda line: None, began: float | None = None
) -> Iterator[Endpoint]:
    """Yields the endpoint once it has made a picture, and stops it after the block. Arguments as in `endpoint.running`."""
    began = time.time() if began is None else began
    check(section, folder)
    with ports.claim(section.port, section.host, "serve.port"), _running(section, folder, model_id, report, began) as here:
        yield here


@contextmanager
def _running(section: ServeSection, folder: Path, model_id: str, report: Report, began: float) -> Iterator[Endpoint]:
    from ray import serve

    from strata.serving.runtime import picture_replica
    from strata.serving.runtime.deployments import NAME
    from strata.serving.runtime.start.deploy import CONTROLLER

    logging.getLogger("ray.serve").setLevel(logging.WARNING)  # it logs each step of the start
    phases = {"this command": time.time() - began}
    network = Network.within(one_machine="RAY_ADDRESS" not in os.environ)
    keys_file = access.keys_file()
    gateway = settings.gateway(section, model_id, network, str(keys_file) if keys_file else None)
    spec = PicturesSpec.of(section, folder, model_id, network)
    cpus = section.pictures.replicas * section.pictures.workers
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    with cluster.connected(cpus, SPARE_CPUS) as ends_with_us:
        phases["Ray"] = endpoint.since(began, phases)
        limit_s = float(section.start_timeout_s or DEFAULT_LIMIT_S[section.device])
        start = StartProgress(limit_s, report, lambda: failures.logs(began), endpoint.describe)
        start.during("starting Ray Serve", lambda: serve.start(proxy_location="Disabled", controller_options=CONTROLLER))
        phases["Serve"] = endpoint.since(began, phases)
        if NAME in serve.status().applications:
            raise UserError("This Ray cluster serves a Strata endpoint already.", "Stop that one first, or use another cluster.")
        directory = Directory(model_id)
        directory.clear()
        try:
            url = ports.url(section.host, section.port)
            application = picture_replica.build(gateway, spec, limit_s)
            start.during("waiting for the workers", lambda: _deploy(application, began))
            replicas = start.during("waiting for the workers", lambda: endpoint.published(directory, (picture_replica.ROLE,)))
            start.during("waiting for a first picture", lambda: _first_picture(url, network, start, began))
            slowest = max((entry["phases"] for entry in replicas[picture_replica.ROLE]), key=lambda each: sum(each.values()))
            phases |= {"replica process": slowest["process"], "workers": slowest["workers"]}
            phases["first picture"] = endpoint.since(began, phases)
            asyncio.run(readiness.publish_warm_up(directory))
            start.during("waiting for /ready", lambda: client.wait_until_ready(url, limit_s=start.left_s))
            wanted = {"gateway": section.gateways, picture_replica.ROLE: section.pictures.replicas}
            try:
                yield Endpoint(url, model_id, phases, wanted)
            finally:
                if ends_with_us:  # with the cluster, requests in progress would end unanswered
                    endpoint.delete()
        finally:
            if not ends_with_us:
                endpoint.leave()


def _deploy(application: object, began: float) -> None:
    from strata.serving.runtime.start import deploy

    try:
        deploy.bring_up(application)
    except RuntimeError as error:
        raise _refused(str(error), began) from None


def _first_picture(url: str, network: Network, start: StartProgress, began: float) -> None:
    """Makes a picture of one step. Some models fail only then, and a GPU compiles."""
    with httpx.Client(base_url=url, headers=access.starter_headers(network.secret)) as http:
        while (failure := endpoint.answered(http, ROUTE, dict(FIRST), start)) is not None:
            if not failure.again:
                raise _refused(failure.reason, began)
            time.sleep(LOOK_S)


def _refused(failure: str, began: float) -> UserError:
    cause = failures.cause_of(failure, began)
    if cause is None:
        return UserError(
            f"A worker ended while it started: {failures.ending(failure)}{shown(failures.logs(began))}",
            "Start it again. If it was killed for memory, close something or use fewer workers; see 'strata doctor'.",
        )
    return UserError(f"This model cannot be served: {cause}", "Mend the model folder or the recipe's serve.pictures section.")
