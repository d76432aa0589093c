"""What the command prints: the plan before, the results after, and the status it exits with."""

import io
from typing import Any

import pytest
from rich.console import Console, RenderableType

from study.config import load_study
from study.data import Tokens
from study.driver import Job
from study.estimates import estimate
from study.space import plan_trials
from study.tables import plan_table, print_results, results_table


def rendered(*parts: RenderableType, width: int = 160) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    with console.capture() as capture:
        console.print(*parts)
    return [line.rstrip() for line in capture.get().splitlines()]


def trial(**values: Any) -> dict[str, Any]:
    """A catalogue's row, as far as the table reads it."""
    summary = {
        "final_loss": 2.3456789, "peak_grad_norm": 30.0, "peak_step": 20123, "median_grad_norm": 0.5,
        "clipped_fraction": 0.333,
    }  # fmt: skip
    return {
        "id": "run_00000", "arm": "an arm", "seed": 0, "status": "finished", "reason": None, "step": 100000,
        "summary": summary, "notes": [], "error": None, **values,
    }  # fmt: skip


def test_a_plan_lists_trials_parameters_memory_and_what_changes_nothing(text: Tokens) -> None:
    study = load_study("figure", ["trial.steps=100000"])
    jobs = [Job(plan, estimate(plan.config, text)) for plan in plan_trials(study)]
    lines = rendered(plan_table(study, jobs))
    assert lines[0] == "study figure: 4 trials"
    assert lines[1].split() == ["trial", "arm", "seed", "steps", "parameters", "memory"]
    assert lines[2].startswith("00000  Pre-Norm | Gradient Clip=10 | Run 1")
    parameters = f"{jobs[0].estimate.num_parameters:,}"
    assert lines[2].split()[-5:-2] == ["0", "100,000", parameters] and lines[2].endswith(" MiB")
    notes = [line for line in lines if line.startswith("note: ")]
    assert len(notes) == 1 and notes[0].startswith("note: Pre-Norm | Attn. Relax | Gradient Clip=1: pb_relax")


def test_results_are_a_line_a_trial_with_its_main_numbers() -> None:
    lines = rendered(results_table([trial(), trial(seed=1, summary=None, step=0, status="pending")]))
    assert " ".join(lines[1].split()) == "an arm 0 finished 100,000 2.346 30 20,123 0.5 33%"
    assert " ".join(lines[2].split()) == "an arm 1 pending 0 - - - - -"


def test_a_divergence_says_why_a_failure_its_error_and_an_arm_its_note() -> None:
    lines = rendered(
        results_table(
            [
                trial(status="diverged", reason="nonfinite_loss"),
                trial(id="run_00001", status="failed", error="OSError: disk full", notes=["it is a no-op"]),
            ]
        )
    )
    assert "diverged (nonfinite_loss)" in lines[1]
    assert lines[2].startswith("an arm *")
    assert lines[3:] == ["note: * an arm: it is a no-op", "run_00001 failed: OSError: disk full"]


def test_a_narrow_console_loses_no_number() -> None:
    label = "a label far longer than what is left beside the numbers in this console"
    text = "\n".join(rendered(results_table([trial(arm=label)]), width=100))
    for part in ("100,000", "2.346", "20,123", "33%"):
        assert part in text
    assert set(label.split()) <= set(text.split())


@pytest.mark.parametrize(
    ("run_status", "trial_status", "status", "says"),
    [
        ("finished", "finished", 0, "run r finished; traces in "),
        ("finished", "diverged", 0, "run r finished"),  # divergence is a result
        ("finished", "failed", 1, "run r finished"),
        ("interrupted", "pending", 130, "run r was interrupted; what it recorded is in "),
    ],
)
def test_the_exit_status_tells_how_a_run_came_out(
    store: Any, run_status: str, trial_status: str, status: int, says: str
) -> None:
    store.add_run("r", status=run_status, arms=1)
    store.catalogue.save("r", {}, [], {"r_00000": {"status": trial_status, "error": "Killed: by hand"}})
    buffer = io.StringIO()
    assert print_results(Console(file=buffer, width=120), store.catalogue, "r") == status
    assert says in buffer.getvalue() and store.storage.uri in buffer.getvalue()
    assert ("Killed: by hand" in buffer.getvalue()) == (trial_status == "failed")


@pytest.mark.parametrize("label", ["clip [/red] 1", "clip [bold] 1"])
def test_a_label_is_shown_as_it_is_and_never_read_as_a_style(label: str) -> None:
    assert label in "\n".join(rendered(results_table([trial(arm=label)])))
