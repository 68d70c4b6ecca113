"""`muster bench device`: what one device reaches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from muster.cli.bench.common import FolderOption, JsonOption
from muster.cli.common import console
from muster.observe.progress import working

LABELS = {
    "bf16_tflops": ("matrix product, bf16", "TFLOP/s"),
    "fp16_tflops": ("matrix product, fp16", "TFLOP/s"),
    "fp32_tflops": ("matrix product, fp32", "TFLOP/s"),
    "memory_gb_per_s": ("memory, read and write", "GB/s"),
    "host_to_device_gb_per_s": ("host to device", "GB/s"),
    "device_to_host_gb_per_s": ("device to host", "GB/s"),
    "launch_us": ("starting a kernel", "µs"),
}


def device(
    folder: FolderOption = Path("runs/bench"),
    seconds: Annotated[
        float, typer.Option(min=1.0, metavar="S", help="How long to measure, roughly.")
    ] = 10.0,
    as_json: JsonOption = False,
) -> None:
    """What this GPU (or, without one, the CPU) reaches, against its specification."""
    from muster.bench.device import bench

    with working("measuring", "measurements") as tell:
        document, path = bench(folder, seconds, tell)
    if as_json:
        print(json.dumps(document, indent=2))
    else:
        _show(document, path)


def _show(document: dict[str, Any], path: Path) -> None:
    from rich.table import Table

    figures = {**document["measured"], **document["copies"]}
    table = Table("", "measured", "peak", "share")
    for column in table.columns[1:]:
        column.justify = "right"
    for key, (label, unit) in LABELS.items():
        if key not in figures:
            continue
        of_host = key.endswith(("_to_device_gb_per_s", "_to_host_gb_per_s"))
        peak = document["peaks"].get("host_gb_per_s" if of_host else key)
        reached = f"{figures[key] / peak:.0%}" if peak else "–"
        specified = f"{peak:,.4g}" if peak else "–"
        table.add_row(label, f"{figures[key]:,.3g} {unit}", specified, reached)
    console.print(f"{document['title']}, torch {document['torch']}")
    console.print(table)
    console.print(f"kept in {path}", soft_wrap=True)
