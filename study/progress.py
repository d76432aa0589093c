"""What a person sees while a run goes on: one line a trial, or plain lines without a terminal."""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

PLAIN_SECONDS = 10.0  # between two plain lines of a trial
SHOWN = 40  # lines of the live table; a run of a thousand trials shows the busy ones
COLORS = {"running": "cyan", "finished": "green", "diverged": "yellow", "failed": "red"}


@dataclass
class Line:
    """The state of one trial as it is shown."""

    label: str
    num_steps: int
    status: str = "pending"
    step: int = 0
    loss: float | None = None
    grad_norm: float | None = None
    steps_per_second: float = 0.0
    data_wait: float = 0.0
    note: str = ""
    said_at: float = 0.0

    @property
    def left(self) -> str:
        """Time left at the present speed."""
        if self.status != "running" or not self.steps_per_second:
            return ""
        seconds = int((self.num_steps - self.step) / self.steps_per_second)
        hours, minutes = seconds // 3600, seconds // 60 % 60
        return f"{hours}:{minutes:02d}:{seconds % 60:02d}" if hours else f"{minutes}:{seconds % 60:02d}"


class Progress:
    """Shows the lines of a run; use as a context manager, tell it by `update`."""

    def __init__(self, console: Console, lines: dict[str, Line]) -> None:
        self.console, self.lines = console, lines
        self.live = console.is_terminal
        self._lock = threading.RLock()
        self._display: Live | None = None

    def __enter__(self) -> "Progress":
        if self.live:
            self._display = Live(get_renderable=self.table, console=self.console, refresh_per_second=4)
            self._display.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._display is not None:
            self._display.stop()

    def add(self, trial_id: str, line: Line) -> None:
        with self._lock:
            self.lines[trial_id] = line

    def update(self, trial_id: str, **values: Any) -> None:
        """Set fields of a trial's line."""
        with self._lock:
            line = self.lines[trial_id]
            changed = values.get("status", line.status) != line.status
            for name, value in values.items():
                setattr(line, name, value)
            if self._display is None and (changed or time.monotonic() - line.said_at >= PLAIN_SECONDS):
                line.said_at = time.monotonic()
                self.console.print(Text(plain(trial_id, line)), soft_wrap=True)

    def table(self) -> Table:
        """The live table."""
        with self._lock:
            lines = list(self.lines.items())
        table = Table(box=None, pad_edge=False, header_style="bold")
        table.add_column("trial", no_wrap=True, overflow="ellipsis", ratio=1)
        for name in ("status", "step", "loss", "grad norm", "steps/s", "data wait", "left"):
            table.add_column(name, justify="left" if name == "status" else "right", no_wrap=True)
        for _, line in shown(lines):
            table.add_row(
                Text(line.label),
                Text(line.status + (f" {line.note}" if line.note else ""), COLORS.get(line.status, "dim")),
                f"{line.step:,}/{line.num_steps:,}",
                number(line.loss),
                number(line.grad_norm),
                f"{line.steps_per_second:.1f}" if line.status == "running" else "",
                f"{line.data_wait:.0%}" if line.status == "running" else "",
                line.left,
            )
        if len(lines) > SHOWN:
            done = sum(line.status in ("finished", "diverged", "pruned", "failed") for _, line in lines)
            table.caption = f"{done:,} of {len(lines):,} trials ended"
        return table


def shown(lines: Sequence[tuple[str, Line]]) -> list[tuple[str, Line]]:
    """The lines that fit: running ones first where there are too many."""
    if len(lines) <= SHOWN:
        return list(lines)
    order = {"running": 0, "failed": 1, "diverged": 2, "pending": 3}
    return sorted(lines, key=lambda item: order.get(item[1].status, 4))[:SHOWN]


def number(value: float | None) -> str:
    """A number in four digits; a dash where there is none."""
    return "-" if value is None else f"{value:.4g}"


def plain(trial_id: str, line: Line) -> str:
    """One line of text, for logs."""
    text = f"{trial_id}  {line.status:<8}  step {line.step:,}/{line.num_steps:,}"
    if line.step:
        text += f"  loss {number(line.loss)}  grad norm {number(line.grad_norm)}"
    if line.status == "running" and line.steps_per_second:
        text += f"  {line.steps_per_second:.1f} steps/s  left {line.left}"
    return f"{text}  {line.note}  {line.label}" if line.note else f"{text}  {line.label}"
