"""Cache salts: requests with different salts share no KV blocks (vLLM puts `cache_salt` into the hash of the first block).

Without one, a tenant could find out by the time to first token whether another has sent a prompt with the same beginning.
"""

import hashlib
import hmac

from strata.serving.tenants.tenant import Tenant

DIGITS = 32


def salt(secret: bytes, tenant: Tenant) -> str | None:
    """Salt of a tenant, which nobody can derive without the endpoint's secret. None for a tenant that shares its cache."""
    if tenant.limits.share_cache:
        return None
    return hmac.new(secret, b"cache-salt:" + tenant.name.encode(), hashlib.sha256).hexdigest()[:DIGITS]


def combined(salt: str | None, of_client: str | None) -> str | None:
    """Salt of a request. A client's own salt divides its tenant's cache further."""
    return f"{salt}:{of_client}" if salt and of_client else salt or of_client
