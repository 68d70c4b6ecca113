"""How far something is: a bar on a terminal, one line in a pipe."""

import pytest

from muster.observe import progress
from muster.observe.progress import working
from processes import until


@pytest.fixture
def told(capsys):
    """What stdout and stderr have got so far."""
    texts = ["", ""]

    def read() -> list[str]:
        texts[:] = (old + new for old, new in zip(texts, capsys.readouterr(), strict=True))
        return texts

    return read


def test_a_pipe_gets_one_line_on_stderr_if_it_takes_long(monkeypatch, told):
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    with working("at once"):
        pass
    monkeypatch.setattr(progress, "PATIENCE_S", 0.0)
    with working("slowly [/red]", "batches") as tell:
        tell(1, 2)
        until(lambda: "slowly" in told()[1])
        with tell.paused():
            print("result")
    assert told() == ["result\n", "slowly [/red] …\n"]


def test_a_terminal_gets_a_bar_on_stderr_that_steps_aside_for_what_is_printed(monkeypatch, told):
    monkeypatch.setenv("FORCE_COLOR", "1")  # a terminal, to rich
    monkeypatch.setenv("COLUMNS", "120")
    with working("slowly [/red]", "batches") as tell:
        until(lambda: "slowly [/red]" in told()[1])
        assert " of " not in told()[1]
        tell(1, 2000)
        until(lambda: "1 of 2,000 batches" in told()[1])
        with tell.paused():
            before = told()[1]
            print("result")
            tell(2, 2000)
            assert told()[1] == before
        until(lambda: "2 of 2,000 batches" in told()[1])
    assert told()[0] == "result\n"
