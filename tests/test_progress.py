"""A person sees what goes on: a live table in a terminal, plain lines in a log."""

import io
from collections.abc import Callable

import pytest
from rich.console import Console

from study import progress as progress_module
from study.progress import SHOWN, Line, Progress, number, plain, shown


def line(**values: object) -> Line:
    return Line(**{"label": "Pre-Norm | Clip=1", "num_steps": 1200, **values})  # type: ignore[arg-type]


def log() -> tuple[Console, Callable[[], list[str]]]:
    """A console that is no terminal, and what was printed to it."""
    buffer = io.StringIO()
    return Console(file=buffer, width=40), lambda: buffer.getvalue().splitlines()


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (0.0, "0"), (2.34567, "2.346"), (12345.6, "1.235e+04"), (1e-7, "1e-07"), (30.0, "30")],
)
def test_a_number_has_four_digits_and_its_absence_a_dash(value: float | None, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(
    ("step", "speed", "left"),
    [(200, 10.0, "1:40"), (1200, 10.0, "0:00"), (0, 0.1, "3:20:00"), (1193, 2.0, "0:03"), (5, 0.0, "")],
)
def test_the_time_left_follows_from_the_speed(step: int, speed: float, left: str) -> None:
    assert line(status="running", step=step, steps_per_second=speed).left == left
    assert line(status="finished", step=step, steps_per_second=speed).left == ""


def test_a_plain_line_says_all_that_is_known() -> None:
    running = line(status="running", step=1100, loss=2.5, grad_norm=0.71239, steps_per_second=25.0)
    assert plain("figure_00001", running) == (
        "figure_00001  running   step 1,100/1,200  loss 2.5  grad norm 0.7124  25.0 steps/s  left 0:04  "
        "Pre-Norm | Clip=1"
    )
    ended = line(status="diverged", step=40, note="nonfinite_loss at 31")
    assert plain("x", ended) == (
        "x  diverged  step 40/1,200  loss -  grad norm -  nonfinite_loss at 31  Pre-Norm | Clip=1"
    )
    assert plain("x", line()) == "x  pending   step 0/1,200  Pre-Norm | Clip=1"


def test_a_log_gets_whole_lines_at_every_change_of_status_and_now_and_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    console, printed = log()
    with Progress(console, {"a": line(), "b": line(label="[not] a style [/]")}) as progress:
        assert not progress.live
        progress.update("a", status="running")
        for step in range(100):
            progress.update("a", step=step)
        assert len(printed()) == 1
        monkeypatch.setattr(progress_module, "PLAIN_SECONDS", 0.0)
        progress.update("a", step=100, loss=3.0)
        progress.update("b", status="failed", note="out of memory")
    lines = printed()  # wider than the console, and not wrapped: a log is for grep
    assert [text.split()[:2] for text in lines] == [["a", "running"], ["a", "running"], ["b", "failed"]]
    assert "step 100/1,200  loss 3" in lines[1]
    assert lines[2].endswith("out of memory  [not] a style [/]")


def test_a_trial_that_is_added_later_is_shown_too() -> None:
    console, printed = log()
    with Progress(console, {}) as progress:
        progress.add("late", line())
        progress.update("late", status="running", step=7)
    assert printed()[0].startswith("late  running   step 7/1,200")


def test_a_terminal_gets_one_live_line_a_trial() -> None:
    buffer = io.StringIO()
    console = Console(file=buffer, force_terminal=True, width=120, color_system=None)
    lines = {"a": line(), "b": line(label="DeepNorm")}
    with Progress(console, lines) as progress:
        assert progress.live
        progress.update(
            "a", status="running", step=600, loss=2.5, grad_norm=0.75, steps_per_second=30.0, data_wait=0.125
        )
        progress.update("b", status="diverged", step=40, note="nonfinite_loss at 31")
    page = io.StringIO()
    Console(file=page, width=120).print(progress.table())
    header, first, second = (text.split() for text in page.getvalue().splitlines())
    assert " ".join(header) == "trial status step loss grad norm steps/s data wait left"
    assert " ".join(first) == "Pre-Norm | Clip=1 running 600/1,200 2.5 0.75 30.0 12% 0:20"
    assert " ".join(second) == "DeepNorm diverged nonfinite_loss at 31 40/1,200 - -"
    assert "DeepNorm" in buffer.getvalue()  # it was on the screen


def test_of_a_thousand_trials_the_busy_ones_are_shown() -> None:
    lines = [(str(number), line(status="finished")) for number in range(1000)]
    lines[700] = ("700", line(status="running"))
    lines[900] = ("900", line(status="failed"))
    found = shown(lines)
    assert len(found) == SHOWN and [name for name, _ in found[:2]] == ["700", "900"]
    assert shown(lines[:SHOWN]) == lines[:SHOWN]
    table = Progress(log()[0], dict(lines)).table()
    assert table.row_count == SHOWN and table.caption == "999 of 1,000 trials ended"
