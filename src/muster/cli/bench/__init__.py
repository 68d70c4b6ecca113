"""`muster bench`: how fast this hardware really is. One file for each of its forms."""

from __future__ import annotations

import typer

from muster.cli.bench import collectives, device, overlap, p2p, scaling

app = typer.Typer(no_args_is_help=True, help="Measure how fast this hardware really is.")
app.command()(device.device)
app.command()(collectives.collectives)
app.command()(p2p.p2p)
app.command()(overlap.overlap)
app.command()(scaling.scaling)


@app.callback()
def group() -> None:
    """Measure how fast this hardware really is."""
