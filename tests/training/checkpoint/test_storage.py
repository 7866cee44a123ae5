from pathlib import Path

import pytest

from strata.platform.errors import UserError
from strata.training.checkpoint.storage import folder


@pytest.mark.parametrize("scheme", ["", "file://", "local://"])  # a path, pyarrow's scheme, fsspec's scheme
def test_folder_behind_a_path_or_uri(tmp_path: Path, scheme: str) -> None:
    place = folder(f"{scheme}{tmp_path}/here")
    assert place.names() == [] and place.size("a") is None
    (place / "inner").write("a", b"one")
    assert place.names() == ["inner"] and (place / "inner").size("a") == 3
    assert (place / "inner").read("a") == b"one" == (tmp_path / "here" / "inner" / "a").read_bytes()
    with (place / "inner").open("a") as file:
        assert file.read_at(2, 1) == b"ne"
    (place / "inner").remove()
    assert place.names() == []


def test_unknown_scheme_is_refused() -> None:
    with pytest.raises(UserError, match=r"train\.checkpoints=nope://x cannot be opened"):
        folder("nope://x")
