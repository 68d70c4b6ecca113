"""How far something is that takes its time: a bar on a terminal, one line elsewhere."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from muster.observe.terminal import Terminal

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

Report = Callable[[int, int], None]  # done, of how many

PATIENCE_S = 3.0  # of someone who sees nothing


def silent(done: int, total: int) -> None:
    """For who does not want to be told."""


class Working:
    """Called with what is done, and of how many. `Report`, for functions that know nothing of terminals."""

    def __init__(self, bar: Progress | None = None, task: TaskID | None = None) -> None:
        self._bar, self._task = bar, task

    def __call__(self, done: int, total: int) -> None:
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=done, total=total)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Without the bar, for what is printed in the meantime."""
        if self._bar is None:
            yield
            return
        self._bar.stop()
        try:
            yield
        finally:
            self._bar.start()


@contextmanager
def working(words: str, unit: str = "") -> Iterator[Working]:
    """Show on stderr that something takes its time, so that stdout has the result alone. A terminal gets a
    bar, which moves once it is told how much is done, and goes away at the end; anything else gets
    `words`, once, if it takes longer than `PATIENCE_S`."""
    errors = Terminal(stderr=True)
    if errors.is_terminal:
        with _bar(errors, unit) as bar:
            yield Working(bar, bar.add_task(words, total=None))
        return
    late = threading.Timer(PATIENCE_S, errors.print, [f"{words} …"], {"soft_wrap": True})
    late.daemon = True
    late.start()
    try:
        yield Working()
    finally:
        late.cancel()


def _bar(console: Terminal, unit: str) -> Progress:
    from rich.progress import (
        BarColumn,
        Progress,
        ProgressColumn,
        Task,
        TextColumn,
        TimeRemainingColumn,
    )
    from rich.text import Text

    class Count(ProgressColumn):
        def render(self, task: Task) -> Text:
            if task.total is None:
                return Text()
            return Text(f"{task.completed:,.0f} of {task.total:,.0f} {unit}".rstrip())

    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        Count(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        redirect_stdout=False,  # it would go to stderr
        redirect_stderr=False,
    )
