"""Go's regular expressions, which Kubernetes and Prometheus use, as Python's."""

import re
from functools import lru_cache


@lru_cache(maxsize=512)
def compiled(pattern: str) -> re.Pattern[str]:
    """Flags may be anywhere in Go's, and its `$` does not match before a newline at the end. Raises re.error."""
    flags = "".join(re.findall(r"\(\?([a-z]+)\)", pattern))
    body = re.sub(r"\(\?[a-z]+\)", "", pattern)
    body = re.sub(r"(?<!\\)\$$", r"\\Z", body)
    return re.compile(f"(?{flags})(?:{body})" if flags else body)
