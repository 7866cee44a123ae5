"""Names of the objects that terminate TLS in front of a RayService (component `tls`)."""

import json

from strata.deploy.documents import Document

KINDS = ("Gateway", "HTTPRoute", "ConfigMap")
PREFIX = "strata-tls"  # of the objects and of the Secret with the certificate
BACKEND = "strata-gateway-istio"  # Istio's Service of the Gateway that the operator creates for the RayService


def fill(document: Document, name: str) -> None:
    """Replaces the default name of the RayService by its own, in the objects' names and in their references to each other."""
    if document["kind"] in KINDS and document["metadata"]["name"].startswith(PREFIX):
        text = json.dumps(document)
        for default in (PREFIX, BACKEND):
            text = text.replace(f'"{default}', f'"{name}{default.removeprefix("strata")}')
        document.update(json.loads(text))
