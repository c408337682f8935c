"""The Trainer collects garbage before it trains: most of a test's time, unless what was imported is set aside."""

import gc

import pytest

import tests.hf.nodes  # noqa: F401  # what there is to set aside


@pytest.fixture(autouse=True, scope="session")
def imported_modules_are_no_garbage():
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
