"""The private names of torch's that muster uses are where they are expected."""

from importlib import import_module

import pytest
import torch

from muster import torch_internals


@pytest.mark.parametrize(("name", "home"), torch_internals.HOMES.items())
def test_torch_still_has_it(name, home):
    try:
        import_module(home)
    except ImportError:
        pytest.fail(f"torch {torch.__version__} has no module {home}, where {name} was")
    found = getattr(torch_internals, name, None)
    assert found is not None, f"torch {torch.__version__} has no {home}.{name}"


def test_any_other_name_is_refused():
    with pytest.raises(AttributeError, match="has no attribute nothing"):
        torch_internals.nothing  # noqa: B018
