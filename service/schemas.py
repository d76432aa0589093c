"""The shape of every JSON answer. Times are seconds since the epoch (UTC), as in the catalogue.

Numbers are finite or null. Of rows in lists only `id` is certain to be there, since `fields`
chooses among the others.
"""

from typing import Any, Literal

from pydantic import BaseModel, Field

Nonfinite = Literal["nan", "inf", "-inf"]


class Run(BaseModel):
    """One execution of a study."""

    id: str
    study: str | None = None
    status: str | None = Field(None, description="pending, running, finished, failed, interrupted, lost")
    created_at: float | None = None
    ended_at: float | None = None
    heartbeat: float | None = None
    host: str | None = None
    git_commit: str | None = None
    versions: dict[str, Any] | None = None
    data: list[Any] | None = None
    notes: list[str] | None = None
    error: str | None = None
    num_trials: dict[str, int] | None = Field(None, description="How many trials have which status")
    config: dict[str, Any] | None = None


class Trial(BaseModel):
    """One training in a run."""

    id: str
    run_id: str | None = None
    number: int | None = None
    arm: str | None = None
    arm_number: int | None = None
    seed: int | None = None
    status: str | None = Field(None, description="pending, running, finished, diverged, pruned, failed, lost")
    reason: str | None = Field(None, description="Why it counts as diverged")
    diverged_step: int | None = None
    step: int | None = None
    num_steps: int | None = None
    loss: float | None = None
    grad_norm: float | None = None
    steps_per_second: float | None = None
    started_at: float | None = None
    ended_at: float | None = None
    heartbeat: float | None = None
    attempts: int | None = None
    num_parameters: int | None = None
    overrides: dict[str, Any] | None = None
    notes: list[str] | None = None
    summary: dict[str, Any] | None = None
    error: str | None = None
    config: dict[str, Any] | None = None


class Arm(BaseModel):
    """All trials of a run that differ only in seed."""

    number: int
    label: str
    seeds: list[int]
    trials: list[str]
    statuses: dict[str, int]


class RunDetail(Run):
    """A run with its arms and trials (without their configs: see /runs/{id}/trials)."""

    kind: Literal["run"] = "run"
    results: dict[str, Any] | None = None
    arms: list[Arm]
    trials: list[Trial]


class TrialDetail(Trial):
    """One trial, for an id that names one."""

    kind: Literal["trial"] = "trial"


class RunPage(BaseModel):
    """A page of runs, newest first; `next` is the cursor of the page after it, if there is one."""

    runs: list[Run]
    next: str | None = None


class TrialPage(BaseModel):
    """A page of a run's trials."""

    run: str
    total: int = Field(description="Trials that match, on all pages together")
    trials: list[Trial]
    next: str | None = None


class NonfinitePlace(BaseModel):
    """Where an array carries null because the value has no JSON form."""

    metric: str
    step: int
    value: Nonfinite


class MetricSeries(BaseModel):
    """A metric's points: all of them, or the min and max of every bucket, the ends, the non-finite."""

    metric: str
    num_total: int = Field(description="Points in the range that was asked for")
    num_returned: int
    sampled: bool
    first_nonfinite_step: int | None
    step: list[int]
    value: list[float | None]


class TrialTraces(BaseModel):
    """The series of one trial."""

    trial: str
    arm: str
    arm_number: int
    seed: int
    status: str
    last_step: int
    first_nonfinite_step: int | None
    series: list[MetricSeries]
    nonfinite: list[NonfinitePlace]


class Traces(BaseModel):
    """Traces of several trials, and what they say in sum."""

    run: str
    num_total: int
    num_returned: int
    sampled: bool
    last_step: int
    first_nonfinite_step: int | None
    metrics: list[str] = Field(description="Every metric that can be asked for here")
    warnings: list[str]
    trials: list[TrialTraces]


class Health(BaseModel):
    """The process answers."""

    status: Literal["ok"] = "ok"


class Readiness(BaseModel):
    """The catalogue can be read; `empty` before the first run."""

    status: Literal["ok"] = "ok"
    catalogue: Literal["empty", "ready"]
