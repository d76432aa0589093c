"""The lines of a picture as numbers, for whoever draws them: grouped, with bands, smoothed, sampled.

What a line is, its words and its band come from the code that draws the pictures. Seeds are
aggregated and lines are smoothed at every step first, and sampled last, so that neither grouping
nor smoothing changes with the zoom.
"""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from service import views
from service.answers import etag_of, json_answer, selection_etag, unchanged
from service.context import Context, Ctx
from service.curves import Arm, TrialTrace, label_of, scale_of, smoothed
from service.options import Axis, Band, PictureOptions
from service.pictures import MAX_RUNS, arms
from service.problems import bad_parameter, problem_responses
from service.routes import MAX_STEP, Id
from service.sampling import Series, name_of
from service.schemas import Nonfinite
from service.seeds import aggregate
from service.store import STANDARD_COLUMNS, Selection, Store

router = APIRouter(tags=["runs"], responses=problem_responses(401, 404, 422, 503))
Row = dict[str, Any]


class Line(BaseModel):
    """Points of a line: value is null where it is not finite."""

    step: list[int]
    value: list[float | None]


class Diverged(BaseModel):
    """Where a trial of a curve diverged; `value`: the last finite one before."""

    trial: str
    seed: int
    step: int
    value: float | None
    reason: str | None


class Gap(BaseModel):
    """Steps `first` to `last` in a row at which a trial has no finite value."""

    trial: str
    seed: int
    value: Nonfinite
    first: int
    last: int


class CurveAnswer(Line):
    """One line: a trial, or the mean of several."""

    key: str = Field(description="Names its arm (or what else it is grouped by) among all")
    label: str
    index: int = Field(description="Which colour and marker a picture gives it")
    run: str
    trials: list[str]
    seeds: list[int]
    num_total: int
    sampled: bool
    scale: dict[Literal["tokens", "time"], float] = Field(
        description="What one step is in tokens, in seconds"
    )
    high: Line | None = Field(None, description="Upper side of the band over seeds")
    low: Line | None = None
    smooth: Line | None = None
    diverged: list[Diverged]
    nonfinite: list[Gap]


class Curves(BaseModel):
    """The lines of one metric."""

    metric: str
    metrics: list[str] = Field(description="Every metric that can be asked for here")
    num_total: int
    num_returned: int
    sampled: bool
    last_step: int
    first_nonfinite_step: int | None
    warnings: list[str]
    curves: list[CurveAnswer]


class CurveOptions(BaseModel):
    """Parameters of curves; those that a picture has too mean the same."""

    model_config = ConfigDict(populate_by_name=True)

    metric: str = Field(
        default="grad_norm", min_length=1, max_length=200, description="A column of the trace"
    )
    trials: str | None = Field(default=None, max_length=4000, description="Ids or numbers, by commas")
    where: list[Annotated[str, Field(max_length=200)]] = Field(default_factory=list, max_length=16)
    group_by: str = Field(default="arm", max_length=100, description="`arm`, `trial`, or a config field")
    band: Band = Band.minmax
    smooth: int = Field(default=0, ge=0, le=100_000, description="Steps of a trailing mean")
    first: int | None = Field(default=None, alias="from", ge=0, le=MAX_STEP)
    last: int | None = Field(default=None, alias="to", ge=0, le=MAX_STEP)
    points: int = Field(default=1000, ge=4, le=20_000, description="Finite points a line")

    def check(self) -> "CurveOptions":
        if self.first is not None and self.last is not None and self.first > self.last:
            raise bad_parameter("from", f"from {self.first} is after to {self.last}")
        return self


Options = Annotated[CurveOptions, Query()]


@router.get("/runs/{id}/curves", response_model=Curves)
async def get_curves(request: Request, context: Ctx, identifier: Id, options: Options) -> Response:
    """The lines that a picture of one metric has: an arm each, with its band over seeds."""
    return await answer(request, context, [identifier], options)


@router.get("/compare/curves", response_model=Curves)
async def compare_curves(
    request: Request,
    context: Ctx,
    runs: Annotated[
        str, Query(min_length=1, max_length=2000, description="Ids of runs or trials, by commas")
    ],
    options: Options,
) -> Response:
    """The same of several runs."""
    return await answer(request, context, names_of(runs), options)


def names_of(runs: str) -> list[str]:
    """The ids of a comma-separated list; 422 with the limit where there are too many."""
    names = list(dict.fromkeys(word.strip() for word in runs.split(",") if word.strip()))
    if not 1 <= len(names) <= MAX_RUNS:
        raise bad_parameter("runs", f"{len(names)} runs; limit: 1 to {MAX_RUNS}")
    return names


async def answer(request: Request, context: Context, names: list[str], options: CurveOptions) -> Response:
    options.check()

    def work() -> Response:
        found = [context.store.find(name) for name in names]
        selections = views.choose_among(found, options.trials, options.where)
        ended = all(selection.ended for selection in selections)
        etag = etag_of([selection_etag(context.store, one, "curves", options) for one in selections])
        fresh = unchanged(request, etag, ended)
        return fresh or json_answer(request, curves(context.store, selections, options), ended, etag)

    return await context.reads.run(work)


def curves(store: Store, selections: Sequence[Selection], options: CurveOptions) -> Row:
    """See Curves."""
    traces = [
        (one.run, TrialTrace(row, store.read(one.run, row, [options.metric])))
        for one in selections
        for row in one.trials
    ]
    known = metric_names([trace for _, trace in traces])
    if options.metric not in known:
        raise bad_parameter("metric", f"unknown metric '{options.metric[:80]}'", known)
    grouping = PictureOptions(group_by=options.group_by, band=options.band)
    several = len(selections) > 1
    runs = {trace.row["id"]: run["id"] for run, trace in traces}
    answers = []
    for index, arm in enumerate(arms(traces, grouping)):
        present = [trial for trial in arm.trials if len(trial.recorded[options.metric])]
        groups = [[trial] for trial in present] if options.band is Band.none else [present]
        for group in groups:
            if group:
                run = runs[group[0].row["id"]]
                key = key_of(group[0].row, options.group_by, arm, several)
                words = {"key": key, "label": label_of(arm, present), "index": index, "run": run}
                answers.append(words | curve(group, options))
    broken = [gap["first"] for one in answers for gap in one["nonfinite"]]
    return {
        "metric": options.metric,
        "metrics": known,
        "num_total": sum(one["num_total"] for one in answers),
        "num_returned": sum(len(one["step"]) for one in answers),
        "sampled": any(one["sampled"] for one in answers),
        "last_step": max((trace.recorded.last_step for _, trace in traces), default=0),
        "first_nonfinite_step": min(broken, default=None),
        "warnings": [text for _, trace in traces for text in trace.recorded.warnings],
        "curves": answers,
    }


def metric_names(traces: Sequence[TrialTrace]) -> list[str]:
    """Columns that can be asked for: the standard ones, what was recorded, what some plot draws."""
    from service.plots import PLOTS

    drawn = [name for plot in PLOTS.values() for name in plot.columns if not name.endswith("*")]
    recorded = [name for trace in traces for name in trace.recorded.names]
    return list(dict.fromkeys([*STANDARD_COLUMNS, *drawn, *recorded]))


def key_of(row: Row, group_by: str, arm: Arm, several: bool) -> str:
    """What a line is called in a URL."""
    if group_by == "arm":
        return f"{row['run_id']}:{row['arm_number']}" if several else str(row["arm_number"])
    return row["id"] if group_by == "trial" else arm.label


def curve(trials: Sequence[TrialTrace], options: CurveOptions) -> Row:
    """One line with all that belongs to it, without its words."""
    every = [trial.recorded[options.metric] for trial in trials]
    low = high = None
    if len(every) == 1:
        line = every[0]
    else:
        line, low, high, _ = aggregate(every, options.band)
    shown = line.cut(options.first, options.last)
    kept = shown.sampled(options.points)
    places = [place for trial in trials if (place := diverged(trial, options))]
    return {
        **points(kept),
        "trials": [trial.row["id"] for trial in trials],
        "seeds": [trial.row["seed"] for trial in trials],
        "num_total": len(shown),
        "sampled": len(kept) < len(shown),
        "scale": {name: scale_of(trials[0].row, Axis(name)) for name in ("tokens", "time")},
        "high": side(high, options),
        "low": side(low, options),
        "smooth": side(smoothed(line, options.smooth), options) if options.smooth > 1 and len(line) else None,
        "diverged": places,
        "nonfinite": [gap for trial in trials for gap in gaps(trial, options)],
    }


def side(series: Series | None, options: CurveOptions) -> Row | None:
    """A line that goes with another, cut and sampled like it."""
    if series is None:
        return None
    return points(series.cut(options.first, options.last).sampled(options.points))


def points(series: Series) -> Row:
    values: list[float | None] = series.values.astype(float).tolist()
    for place in np.flatnonzero(~np.isfinite(series.values)).tolist():
        values[place] = None
    return {"step": series.steps.tolist(), "value": values}


def diverged(trial: TrialTrace, options: CurveOptions) -> Row | None:
    """Where a trial diverged, if that is in the range."""
    row, step = trial.row, trial.row["diverged_step"]
    if row["status"] != "diverged" or step is None:
        return None
    if not (options.first or 0) <= step <= (options.last if options.last is not None else MAX_STEP):
        return None
    before = trial.recorded[options.metric].cut(None, step).values
    finite = before[np.isfinite(before)]
    value = float(finite[-1]) if len(finite) else None
    return {"trial": row["id"], "seed": row["seed"], "step": step, "value": value, "reason": row["reason"]}


def gaps(trial: TrialTrace, options: CurveOptions) -> Iterator[Row]:
    """The non-finite places of a trial, neighbours of one kind together."""
    odd = trial.recorded[options.metric].cut(options.first, options.last).nonfinite()
    if not len(odd):
        return
    kinds = np.where(np.isnan(odd.values), 0, np.sign(np.nan_to_num(odd.values)))
    ends = np.flatnonzero((np.diff(odd.steps) != 1) | (np.diff(kinds) != 0))
    for begin, end in zip([0, *(ends + 1)], [*ends, len(odd) - 1], strict=True):
        yield {
            "trial": trial.row["id"], "seed": trial.row["seed"], "value": name_of(odd.values[begin]),
            "first": int(odd.steps[begin]), "last": int(odd.steps[end]),
        }  # fmt: skip
