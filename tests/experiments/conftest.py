"""One tiny pair for all tests of the commands, and one decode of it."""

import pathlib

import pytest

from tests import pairs, tiny_run
from tests.helpers import quick_compile  # noqa: F401


@pytest.fixture(scope="session")
def folders(tmp_path_factory) -> pairs.Folders:
    return pairs.make_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="session")
def decoded(folders, tmp_path_factory) -> pairs.Run:
    """Greedy and sampled, and all that is shown."""
    with pairs.costs_are():
        return pairs.run_decode(folders, tmp_path_factory.mktemp("decoded"), show=True)


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> pathlib.Path:
    """The data of `tiny_run.tiny_config`."""
    return tiny_run.make_folder(tmp_path_factory.mktemp("data"))
