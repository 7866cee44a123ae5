"""Address of the runbooks in alerts. Rules contain the default; set STRATA_RUNBOOKS to the address of your own copy."""

import os

BASE = "https://strata.example/docs/monitoring.md"
VARIABLE = "STRATA_RUNBOOKS"


def base() -> str:
    return os.environ.get(VARIABLE, BASE).rstrip("#")


def with_base(rules: str) -> str:
    """The text of a rule file with the address that is set."""
    return rules.replace(f"{BASE}#", f"{base()}#")
