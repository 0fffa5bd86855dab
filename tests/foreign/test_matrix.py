"""Models of packages that others wrote, unmodified: equal to one device, or refused by the build.

They need the extra `foreign`; the whole table is `python -m benchmarks.foreign`.
"""

import pytest

from benchmarks.foreign import WAYS, load, run
from benchmarks.foreign_models import MODELS

# What a package does while it is imported is no fault of a model.
pytestmark = pytest.mark.filterwarnings("ignore")

CHEAP = (("gpt2", "fsdp remat"),)
"""What is tried with every change, where the packages are there."""

NO_PLAN = "the plan has no rules, and would split nothing"
STATISTICS = "depends on the batch, as the statistics of BatchNorm do"

REFUSED = {
    ("albert", "pp"): "the model has 1 block to cut between",
    ("clip", "pp"): "the model calls 'vision_model/encoder/layers/0' where it holds 'text_model",
    **{(name, way): NO_PLAN for name in ("resnet", "regnet") for way in ("tp", "dp tp")},
    **{(name, "pp"): STATISTICS for name in ("resnet", "regnet")},
}
"""The cells that no strategy could run, and what the build says."""


def cells():
    for name in MODELS:
        for way in WAYS:
            marks = () if (name, way) in CHEAP else (pytest.mark.full,)
            yield pytest.param(name, way, marks=marks, id=f"{name} {way}")


@pytest.mark.parametrize(("name", "way"), list(cells()))
def test_equals_one_device(name, way):
    try:
        load(name)
    except ImportError as error:
        pytest.skip(f"the extra foreign is not installed: {error}")
    outcome = run(name, way)
    if (name, way) in REFUSED:
        assert outcome.kind == "refused"
        assert REFUSED[name, way] in outcome.text
    else:
        assert outcome.kind == "equal", outcome.text
