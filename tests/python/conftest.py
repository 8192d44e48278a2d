"""Servers that the tests share: one over small models, one over the example models."""

from pathlib import Path

import fixtures
import pytest
from server import ROOT, Server


@pytest.fixture(scope="session")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    fixtures.lay(folder)
    return folder


@pytest.fixture(scope="session")
def shared_server(repository: Path):
    with Server(repository=repository) as running:
        yield running


@pytest.fixture
def server(shared_server: Server):
    """The server over the small models; a test that ends it fails, with what the server printed."""
    yield shared_server
    assert shared_server.alive(), f"the server ended with {shared_server.process.returncode}:\n{shared_server.log()[-4000:]}"


@pytest.fixture(scope="session")
def examples():
    repository = ROOT / "examples" / "repository"
    assert repository.is_dir(), "the example models are not laid: make examples"
    with Server(repository=repository) as running:
        yield running
