"""A replica's Serve logs, and a restarted controller's first call, after vLLM has configured logging."""

import logging
import logging.handlers
from collections.abc import Iterator
from logging.config import dictConfig
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
from ray.serve._private.logging_utils import configure_component_logger, get_component_logger_file_path
from ray.serve.schema import LoggingConfig

from strata.serving.ray_patches import serve_logs


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Serve's own set-up of a replica's logger, writing below `tmp_path`."""
    node = SimpleNamespace(get_logs_dir_path=lambda: str(tmp_path), max_bytes=2**20, backup_count=1)
    monkeypatch.setattr(ray._private.worker, "_global_node", node)
    logger = logging.getLogger(serve_logs.LOGGER)
    before, propagates, level = list(logger.handlers), logger.propagate, logger.level
    configure_component_logger(
        component_name="decode", component_id="d1", logging_config=LoggingConfig(logs_dir=str(tmp_path)), max_bytes=2**20
    )
    yield tmp_path
    logger.handlers[:], logger.propagate = before, propagates
    logger.setLevel(level)


def _configure() -> None:
    """Configures logging as vLLM and uvicorn do on import."""
    dictConfig({"version": 1, "disable_existing_loggers": False, "handlers": {}, "loggers": {}})


def test_restarted_controller_can_call_a_replica_that_imported_vllm(log: Path) -> None:
    serve_logs.keep_open()
    for _ in range(2):
        _configure()
    assert get_component_logger_file_path() is not None


def test_records_after_the_import_are_written(log: Path) -> None:
    serve_logs.keep_open()
    _configure()
    logger = logging.getLogger(serve_logs.LOGGER)
    for number in range(3):
        logger.error("record %d", number)
    [handler] = [one for one in logger.handlers if isinstance(one, logging.handlers.MemoryHandler)]
    handler.flush()
    assert not handler.buffer
    [path] = log.glob("*.log")
    assert all(f"record {number}" in path.read_text() for number in range(3))


def test_ray_still_needs_it(log: Path) -> None:
    """If this fails, Ray has fixed it: remove `serve_logs.py`."""
    _configure()
    with pytest.raises(AttributeError, match="baseFilename"):
        get_component_logger_file_path()
