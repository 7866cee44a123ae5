"""Facts of a running endpoint: its model, context and KV cache, from the OpenAI API and vLLM's metrics."""

import re
from dataclasses import dataclass
from urllib.parse import urlsplit

import httpx

from strata.platform import metrics
from strata.platform.errors import UserError
from strata.serving import access
from strata.serving.bench.clients.load import Target

CACHE = re.compile(r"^vllm:cache_config_info\{(.*)\}", re.MULTILINE)
USAGE = re.compile(rf"^{metrics.SERVE_KV_USAGE.name}\{{(.*)\}}", re.MULTILINE)
LABEL = re.compile(r'(\w+)="([^"]*)"')
TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Facts:
    """None where the endpoint does not report it."""

    target: Target
    strata: bool  # or another server
    context: int | None
    block_size: int | None
    kv_tokens: int | None


def read(url: str, name: str | None = None) -> Facts:
    """`name`: of the model, by default the first one of the endpoint."""
    parts = urlsplit(url if "//" in url else f"http://{url}")
    if parts.scheme != "http" or not parts.hostname:
        raise UserError(f"--url {url} is no http:// address.", "Name the endpoint as http://HOST:PORT.")
    base, key = f"http://{parts.hostname}:{parts.port or 80}", access.key_for(url)
    try:
        with httpx.Client(base_url=base, timeout=TIMEOUT_S, headers=access.headers_for(url)) as http:
            models = http.get("/v1/models").raise_for_status().json()["data"]
            scraped = http.get("/metrics")
    except (httpx.HTTPError, KeyError, ValueError) as error:
        raise UserError(f"{url} does not answer /v1/models: {error}.", "Check --url, and that the endpoint is up.") from None
    if not models:
        raise UserError(f"{url} serves no model.", "Start it with one.")
    model = next((each for each in models if name in (None, each["id"])), None)
    if model is None:
        raise UserError(f"{url} serves no model '{name}'.", f"Choose one of {', '.join(each['id'] for each in models)}.")
    target = Target(parts.hostname, parts.port or 80, model["id"], key)
    text = scraped.text if scraped.is_success else ""
    labels = _cache(text, model["id"])
    block_size, blocks = _number(labels.get("block_size")), _number(labels.get("num_gpu_blocks"))
    kv_tokens = block_size * blocks if block_size and blocks else None
    return Facts(target, bool(USAGE.search(text)), _number(model.get("max_model_len")), block_size, kv_tokens)


def _cache(text: str, model: str) -> dict[str, str]:
    """Labels of the KV cache of an engine of the model. vLLM names no model here; Strata's series name that of each replica."""
    models = {one.get("replica"): one.get("model") for one in (dict(LABEL.findall(each)) for each in USAGE.findall(text))}
    found = [dict(LABEL.findall(labels)) for labels in CACHE.findall(text)]
    return next((labels for labels in found if models.get(labels.get("replica"), model) == model), {})


def _number(value: object) -> int | None:
    return int(value) if isinstance(value, int | str) and str(value).isdigit() else None
