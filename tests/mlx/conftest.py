"""MLX without its compiler, which on a CPU takes seconds for each new step; tests that are about it switch it on."""

import pytest


@pytest.fixture(autouse=True)
def uncompiled():
    mx = pytest.importorskip("mlx.core", reason="mlx has no wheel for this platform")
    mx.disable_compile()
    yield
    mx.enable_compile()


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    """A model directory and data for mlx-lm's command line."""
    from tests.mlx.bases import make_base

    home = tmp_path_factory.mktemp("base")
    make_base(home)
    return home
