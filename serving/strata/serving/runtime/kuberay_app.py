"""Application builder for KubeRay: the `import_path` of a Serve configuration.

Ray Serve builds the application from the recipe, and rebuilds it on every update. The secret that authenticates the links
between processes must not change with an update, so it comes from the environment instead of a random generator.
"""

import hashlib
import os
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path

from pydantic import BaseModel
from ray.serve import Application

from strata.platform import recipe_file
from strata.platform.errors import UserError
from strata.platform.model_families import copies, source
from strata.platform.recipe import ServeSection
from strata.serving.adapters import recipe as adapter_recipe
from strata.serving.adapters.entry import Entry
from strata.serving.models import hybrid_check
from strata.serving.runtime import app
from strata.serving.runtime.models import checks
from strata.serving.spec import EngineSpec, FurtherModel, GatewaySpec, Network
from strata.serving.speculation import draft
from strata.serving.transport.link import SECRET_BYTES

SECRET = "STRATA_LINK_SECRET"


class Arguments(BaseModel):
    recipe: str
    # A folder that every node mounts; or an id on Hugging Face or a bucket's URI, which `strata model pull` has copied in each
    # pod before Ray starts.
    model: str
    name: str | None = None  # model name in the API; default: the run's name


def application(arguments: Arguments) -> Application:
    section = draft.resolved(recipe_file.load(arguments.recipe).serve)
    folder = _folder(arguments.model, section)
    name = arguments.name or copies.name(arguments.model)
    network = Network(None, _secret())
    prefill, decode = (
        replace(EngineSpec.of(role, section, folder, name, network), on_own_nodes=True) for role in ("prefill", "decode")
    )
    gateway = GatewaySpec.of(section, name, network)
    adapters = _adapters(section, arguments.model, folder, {*gateway.names, *section.models})
    models = tuple(_further(section, name, {*gateway.names, *section.models, *(entry.name for entry in adapters or ())}))
    gateway = replace(gateway, on_every_node=True, folder=str(folder), models=models, adapters=adapters)
    return app.build(gateway, prefill, decode)


def _further(section: ServeSection, main: str, taken: set[str]) -> Iterator[FurtherModel]:
    """Models of the recipe beside the main one. A gateway starts their engines, on the nodes of the pools. `taken`: names."""
    for name, model in section.models.items():
        if name == main:
            raise UserError(f"serve.models.{name} has the name of the main model.", "Choose another name.")
        if model.model is None:
            raise UserError(f"serve.models.{name}.run={model.run} is a run, which pods do not have.", "Set model to its folder.")
        own = draft.resolved(section.further(model.changes))
        folder = _folder(model.model, own)
        adapters = _adapters(own, model.model, folder, taken)
        taken |= {entry.name for entry in adapters or ()}
        yield FurtherModel(name, str(folder), own.model_dump(mode="json", exclude={"models"}), adapters)


def _adapters(section: ServeSection, model: str, folder: Path, taken: Collection[str]) -> tuple[Entry, ...] | None:
    if section.adapters is not None and section.adapters.load and not folder.is_dir():
        cause = f"serve.adapters.load needs the files of {model} where the application is built."
        raise UserError(cause, "Copy the model to the shared storage, or load the adapters when the endpoint is up.")
    return adapter_recipe.entries(section, folder, taken)


def _folder(model: str, section: ServeSection) -> Path:
    """Folder of the model in the pods of engines. This process runs on the head, which has the shared storage but no copy."""
    remote = source.is_remote(model)
    folder = copies.found(model) if remote else Path(model)
    if folder is None:
        if section.adapter == "apart":
            fix = "Copy the export to the shared storage and serve it from there, or set serve.adapter=merged."
            raise UserError(f"serve.adapter=apart needs the files of {model} where the application is built.", fix)
        if section.speculative is not None and section.speculative.draft is not None:
            fix = "Copy the model to the shared storage and serve it from there, or set serve.speculative.method=ngram."
            raise UserError(f"{draft.KEY} needs the tokenizer of {model} where the application is built.", fix)
        if section.prefill.replicas > 0:
            hybrid_check.check_config(source.read_config(model))
        return copies.place(model)
    checks.check_folder(section, folder)
    return folder


def _secret() -> bytes:
    secret = os.environ.get(SECRET)
    if not secret:
        raise UserError(f"{SECRET} is not set.", "Set it in every pod to the same long random value, from a Secret.")
    return hashlib.blake2b(secret.encode(), digest_size=SECRET_BYTES).digest()
