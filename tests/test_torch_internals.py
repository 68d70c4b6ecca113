"""The private names of torch's that muster uses are where they are expected."""

import json
import sys
from importlib import import_module

import pytest
import torch

from muster import torch_internals
from processes import run


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


def test_what_torch_would_compile_is_partitioned_without_inductor_s_lowerings(tmp_path):
    code = """
import sys
from muster.torch_internals import LOWERING, import_pattern_matcher
import_pattern_matcher()
from torch._inductor.pattern_matcher import same_mutation_regions
print(LOWERING in sys.modules)
"""
    assert run([sys.executable, "-c", code], tmp_path).stdout == "False\n"


def test_a_function_that_is_imported_late_is_the_real_one():
    late = torch_internals._LateFunctions("json")
    assert late.dumps([1]) == json.dumps([1])
    assert not hasattr(late, "__file__")  # inspect reads it of every module
