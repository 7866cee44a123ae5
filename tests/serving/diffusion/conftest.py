from pathlib import Path

import pytest

from . import tiny_pictures


@pytest.fixture(scope="session")
def picture_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of tiny random models, by family."""
    at = tmp_path_factory.mktemp("picture_models")
    return {family: tiny_pictures.save(family, at / family) for family in tiny_pictures.FAMILIES}
