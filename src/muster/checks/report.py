"""A report, for people and for programs."""

from __future__ import annotations

import json

from rich.console import Console
from rich.table import Table
from rich.text import Text

from muster.checks.findings import Report

COLOURS = {"ok": "green", "note": "cyan", "warn": "yellow", "fail": "bold red"}


def show(report: Report, as_json: bool, console: Console) -> int:
    """One table and one verdict, or one JSON document. Returns the exit code."""
    if as_json:
        print(json.dumps(report.as_dict(), indent=2), flush=True)
        return 0 if report.fit else 1
    hosts = ", ".join(report.hosts) or "no host"
    console.print(f"{report.world} rank(s) on {hosts}, {report.seconds:.1f} s")
    table = Table("step", "", "finding", show_lines=True)
    previous = ""
    for finding in report.findings:
        text = Text(finding.words)
        if finding.cause:
            text.append(f"\ncause: {finding.cause}", style="dim")
        if finding.cure:
            text.append(f"\ncure: {finding.cure}")
        step = "" if finding.step == previous else finding.step
        table.add_row(step, Text(finding.status, style=COLOURS[finding.status]), text)
        previous = finding.step
    console.print(table)
    colour = "green" if report.fit else "bold red"
    console.print(Text(report.verdict, style=colour))
    return 0 if report.fit else 1
