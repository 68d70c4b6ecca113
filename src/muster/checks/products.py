"""Step 4: matrix products with known results, on every rank's device."""

from __future__ import annotations

from collections.abc import Mapping

from muster.checks.context import RankContext, RankReport
from muster.checks.findings import Finding, RankNames
from muster.parallel.device_test import kinds, wrong_product


def measure(context: RankContext) -> RankReport:
    device = context.device
    names = [str(kind).removeprefix("torch.") for kind in kinds(device)]
    return {"wrong": wrong_product(device), "kinds": names, "gpu": device.type == "cuda"}


def judge(reports: Mapping[int, RankReport], rank_names: RankNames) -> list[Finding]:
    wrong = {rank: reports[rank]["wrong"] for rank in sorted(reports) if reports[rank]["wrong"]}
    if not wrong:
        every = ", ".join(reports[min(reports)]["kinds"])
        return [Finding("products", "ok", f"matrix products in {every} are exact")]
    return [
        Finding(
            "products",
            "fail",
            f"{rank_names.name(rank)} computes wrong: {words}",
            cause="a faulty GPU, or its memory" if gpu else "a faulty processor or memory",
            cure="leave it out with CUDA_VISIBLE_DEVICES, look at `nvidia-smi -q -d ECC` and the kernel's Xid errors, "
            "and reset or replace it"
            if gpu
            else "take this machine out of the run and test its memory and processor",
            ranks=(rank,),
            hosts=rank_names.hosts_of([rank]),
        )
        for rank, words in wrong.items()
        for gpu in [reports[rank]["gpu"]]
    ]
