"""Build, push and signature of the container image, with stand-ins for docker and cosign."""

import os
import subprocess
from pathlib import Path

import pytest
import yaml
from support import ROOT

DIGEST = "sha256:" + "0123456789abcdef" * 4
DOCKER = f"""#!/bin/bash
echo docker "$@" >> "$LOG"
while [[ $# -gt 0 ]]; do
  [[ $1 == --metadata-file ]] && printf '{{\\n  "containerimage.digest": "{DIGEST}"\\n}}' > "$2"
  shift
done
"""
COSIGN = """#!/bin/bash
echo cosign "$@" >> "$LOG"
[[ $1 != "$FAILS" ]]
"""


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    for name, text in (("docker", DOCKER), ("cosign", COSIGN)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    return tmp_path


def publish(tools: Path, *words: str, **variables: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    log = tools / "log"
    log.write_text("")
    hidden = ("COSIGN_KEY", "COSIGN_IDENTITY", "COSIGN_ISSUER")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    environment |= {"PATH": f"{tools}:/usr/bin:/bin", "LOG": str(log), "FAILS": "nothing"} | variables
    done = subprocess.run([ROOT / "infra/docker/publish", *words], env=environment, capture_output=True, text=True)
    return done, log.read_text().splitlines()


def test_the_image_has_a_bill_of_materials_and_is_signed_by_digest(tools: Path) -> None:
    (tools / "mine.key").touch()
    done, calls = publish(tools, "registry:5000/team/strata:1.0", COSIGN_KEY=str(tools / "mine.key"))
    signed = f"registry:5000/team/strata@{DIGEST}"
    assert done.stdout.strip() == signed, done.stderr
    build, sign, verify = calls
    for option in ("--sbom=true", "--provenance=mode=max", "--push", "--target gpu", "--tag registry:5000/team/strata:1.0"):
        assert option in build
    assert sign == f"cosign sign --yes --key {tools / 'mine.key'} {signed}"
    assert verify == f"cosign verify --key {tools / 'mine.pub'} {signed}"


def test_key_services_and_keyless_signatures(tools: Path) -> None:
    done, calls = publish(tools, "r/strata:1", "cpu", COSIGN_KEY="gcpkms://key")
    assert done.returncode == 0 and "--target cpu" in calls[0] and "verify --key gcpkms://key" in calls[2]
    done, calls = publish(tools, "r/strata:1", COSIGN_IDENTITY="me@example.com", COSIGN_ISSUER="https://issuer")
    assert done.returncode == 0 and calls[1] == f"cosign sign --yes r/strata@{DIGEST}"
    assert "--certificate-identity me@example.com --certificate-oidc-issuer https://issuer" in calls[2]


def test_nothing_is_built_that_cannot_be_signed(tools: Path) -> None:
    for words, reason in (((), "usage"), (("registry:5000/strata",), "has no tag"), (("r/strata:1",), "COSIGN_IDENTITY")):
        done, calls = publish(tools, *words)
        assert done.returncode != 0 and reason in done.stderr and calls == []


@pytest.mark.parametrize("step", ["sign", "verify"])
def test_an_image_without_a_valid_signature_is_not_named(tools: Path, step: str) -> None:
    done, _ = publish(tools, "r/strata:1", COSIGN_KEY="gcpkms://key", FAILS=step)
    assert done.returncode != 0 and done.stdout == ""


def test_the_example_policy_enforces_signatures() -> None:
    policy = yaml.safe_load((ROOT / "infra/docker/verify-images.yaml").read_text())
    [rule] = policy["spec"]["rules"]
    [images] = rule["verifyImages"]
    assert policy["kind"] == "Policy" and policy["metadata"]["namespace"] == "strata"
    assert images["failureAction"] == "Enforce" and images["required"] and images["mutateDigest"]
