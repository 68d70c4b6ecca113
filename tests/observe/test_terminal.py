"""Text from elsewhere cannot command the terminal, nor be read as markup."""

import io
import sys

import pytest
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from muster.observe.terminal import Terminal, write_text
from muster.reading.text import printable

FOREIGN = "a\x1b]0;title\x07b\x1b[2J\x1b[31mc\x9b1md\x00\x08\x7fe\r\n\tf[/red] [bold]:smile:"


def test_control_characters_and_their_sequences_go_and_everything_else_stays():
    assert printable(FOREIGN) == "abcde\n\tf[/red] [bold]:smile:"
    assert printable("Grüße, 你好 👋🏽 ‏שלום‏ 50 %") == "Grüße, 你好 👋🏽 ‏שלום‏ 50 %"
    assert printable("half a sequence \x1b[") == "half a sequence ["


@pytest.mark.parametrize("kind", ["a string", "a table", "a panel", "styled"])
def test_no_part_of_a_terminal_passes_control_characters_or_reads_markup(kind):
    out = io.StringIO()
    console = Terminal(file=out, force_terminal=True, color_system=None, width=60)
    table = Table("name", title=FOREIGN)
    table.add_row(FOREIGN)
    shown = {
        "a string": FOREIGN,
        "a table": table,
        "a panel": Panel(FOREIGN, title=Text(FOREIGN)),
        "styled": Text.assemble((FOREIGN, "bold"), " x"),
    }
    console.print(shown[kind])
    said = out.getvalue()
    assert not set(said) & {"\x1b", "\x9b", "\x07", "\x08", "\x00", "\x7f", "\r"}
    assert {"f[/red]", "[bold]:smile:"} <= set(said.split())


def test_colours_of_our_own_still_reach_a_terminal():
    out = io.StringIO()
    Terminal(file=out, force_terminal=True, color_system="standard").print("ours", style="red")
    assert out.getvalue() == "\x1b[31mours\x1b[0m\n"


def test_generated_text_is_printable_on_a_terminal_and_whole_in_a_pipe(monkeypatch, capsys):
    write_text("a\x1b[31m\x00b", end="")
    assert capsys.readouterr().out == "a\x1b[31m\x00b"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    write_text("a\x1b[31m\x00b", end="")
    assert capsys.readouterr().out == "ab"
