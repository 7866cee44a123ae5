"""Installed versions of vLLM and Ray against the versions that the patches were written for."""

from importlib.metadata import packages_distributions, version

import pytest

from strata.serving import ray_patches, vllm_patches


@pytest.mark.parametrize(("module", "patches"), [("vllm", vllm_patches), ("ray", ray_patches)])
def test_patches_were_reviewed_for_the_installed_version(module: str, patches: object) -> None:
    [distribution] = set(packages_distributions()[module])
    installed, reviewed = version(distribution), patches.WRITTEN_FOR  # type: ignore[attr-defined]
    assert installed.startswith(f"{reviewed}."), (
        f"{distribution} {installed} is installed, but {patches.__name__} was written for {reviewed}. "  # type: ignore[attr-defined]
        "Review each file there, then update WRITTEN_FOR."
    )
