"""The steps of the check, in order."""

from __future__ import annotations

from muster.checks import (
    balance,
    collectives,
    data,
    devices,
    gradients,
    links,
    network,
    products,
    ranks,
    software,
)
from muster.checks.context import Step

STEPS = (
    Step("software", software.measure, software.judge, ends=True),
    Step("devices", devices.measure, devices.judge, ends=True),
    Step("ranks", ranks.measure, ranks.judge, ends=True),
    Step("products", products.measure, products.judge, ends=True),
    Step("collectives", collectives.measure, collectives.judge, ends=True),
    Step("gradients", gradients.measure, gradients.judge),
    Step("balance", balance.measure, balance.judge, timed=True),
    Step(  # many ranks on a slow network take long
        "links", links.measure, links.judge, limit_s=120.0, timed=True
    ),
    Step("network", network.measure, network.judge),
    Step("data", data.measure, data.judge, limit_s=data.INDEX_S, timed=True),
)
