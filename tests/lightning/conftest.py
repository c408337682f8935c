"""Lightning under each of the names it is installed by."""

from typing import Any

import pytest

from tests.lightning.nodes import NAMESPACES, namespace

_BUILT: dict[str, Any] = {}


@pytest.fixture(params=NAMESPACES)
def pl(request):
    """Every test that asks for this runs once for each namespace."""
    if request.param not in _BUILT:
        _BUILT[request.param] = namespace(request.param)
    return _BUILT[request.param]


@pytest.fixture
def lightning():
    """For tests of which one namespace is enough."""
    name = next(iter(NAMESPACES))
    if name not in _BUILT:
        _BUILT[name] = namespace(name)
    return _BUILT[name]
