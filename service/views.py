"""What the routes answer, computed from the store: plain functions that a thread can run."""

from collections.abc import Sequence
from typing import Any

from service import analysis, fields, schemas
from service.problems import bad_parameter
from service.sampling import Series, name_of
from service.store import STANDARD_COLUMNS, Selection, Store

Row = dict[str, Any]
MAX_VALUES = 2_000_000  # points of one JSON answer


def choose(selection: Selection, trials: str | None, where: Sequence[str]) -> Selection:
    """The same selection with only the trials that were asked for."""
    chosen = fields.matching(fields.named(selection.trials, trials), where)
    return Selection(selection.run, chosen, selection.of, selection.by_name)


def choose_among(
    selections: Sequence[Selection], trials: str | None, where: Sequence[str]
) -> list[Selection]:
    """The same over several runs: a field or trial need be known in one of them only."""
    every = {row["id"]: row for selection in selections for row in selection.trials}
    kept = {row["id"] for row in fields.matching(fields.named(list(every.values()), trials), where)}
    return [
        Selection(one.run, [row for row in one.trials if row["id"] in kept], one.of, one.by_name)
        for one in selections
    ]


def runs_page(
    store: Store,
    status: str | None,
    study: str | None,
    limit: int,
    cursor: str | None,
    wanted: list[str] | None,
) -> dict[str, Any]:
    """A page of runs, newest first; see schemas.RunPage."""
    if store.is_empty():
        return {"runs": [], "next": None}
    before = decoded(cursor) if cursor is not None else None
    rows = store.catalogue.runs(status=status, study=study, limit=limit + 1, before=before)
    following = encoded(rows[limit - 1]) if len(rows) > limit else None
    rows = rows[:limit]
    numbers = store.catalogue.trial_counts(row["id"] for row in rows)
    answers = [answer_of(schemas.Run, row, num_trials=numbers.get(row["id"], {})) for row in rows]
    return {"runs": [only(answer, wanted) for answer in answers], "next": following}


def only(answer: dict[str, Any], wanted: list[str] | None) -> dict[str, Any]:
    """The fields that were asked for; `id` is always there."""
    if wanted is None:
        return answer
    return {name: value for name, value in answer.items() if name == "id" or name in wanted}


def field_names(given: str | None, model: type) -> list[str] | None:
    """The names of a `fields` parameter; 422 for one that the answer doesn't have."""
    if given is None:
        return None
    names = [word.strip() for word in given.split(",") if word.strip()]
    allowed = list(model.model_fields)  # type: ignore[attr-defined]
    for name in names:
        if name not in allowed:
            raise bad_parameter("fields", f"unknown field '{name[:80]}'", allowed)
    return names


def encoded(row: Row) -> str:
    """A cursor: the place after this run."""
    return f"{float(row['created_at']).hex()}_{row['id']}"


def decoded(cursor: str) -> tuple[float, str]:
    when, _, run_id = cursor.partition("_")
    try:
        return float.fromhex(when), run_id
    except (ValueError, OverflowError):
        raise bad_parameter(
            "cursor", f"'{cursor[:80]}' is no cursor", ["what `next` of a page says"]
        ) from None


def run_detail(selection: Selection) -> dict[str, Any]:
    """A run with its arms and trials."""
    run, trials = selection.run, selection.trials
    return schemas.RunDetail(
        **known(schemas.Run, run),
        num_trials=counts(trials),
        results=run["results"],
        arms=arms_of(trials),
        trials=[schemas.Trial(**known(schemas.Trial, row, "config")) for row in trials],
    ).model_dump()


def trials_page(
    selection: Selection, sort: str, limit: int, cursor: str | None, wanted: list[str] | None
) -> dict[str, Any]:
    """A page of a run's trials in the order of a field; see schemas.TrialPage."""
    rows = fields.ordered(selection.trials, sort)
    begin = 0
    if cursor is not None:
        places = [place for place, row in enumerate(rows) if row["id"] == cursor]
        if not places:
            raise bad_parameter("cursor", f"'{cursor[:80]}' is no cursor", ["what `next` of a page says"])
        begin = places[0] + 1
    shown = rows[begin : begin + limit]
    answers = [answer_of(schemas.Trial, row) for row in shown]
    return {
        "run": selection.run["id"],
        "total": len(rows),
        "trials": [only(answer, wanted) for answer in answers],
        "next": shown[-1]["id"] if begin + limit < len(rows) else None,
    }


def report(selection: Selection) -> dict[str, Any]:
    """What the run's numbers say; see study.reading."""
    return analysis.reading(selection.run, selection.trials)


def report_markdown(content: dict[str, Any]) -> str:
    """The same as a document."""
    return analysis.markdown(content)


def answer_of(model: type, row: Row, **more: Any) -> Row:
    """A row as the model has it, without the cost of making one: rows come from columns with types."""
    return {name: more.get(name, row.get(name)) for name in model.model_fields}  # type: ignore[attr-defined]


def known(model: type, row: Row, *without: str) -> Row:
    """What of a row the model has a field for."""
    return {name: value for name, value in row.items() if name in model.model_fields and name not in without}  # type: ignore[attr-defined]


def counts(trials: Sequence[Row]) -> dict[str, int]:
    found: dict[str, int] = {}
    for row in trials:
        found[row["status"]] = found.get(row["status"], 0) + 1
    return found


def arms_of(trials: Sequence[Row]) -> list[schemas.Arm]:
    """Trials that differ only in seed, together."""
    groups: dict[int, list[Row]] = {}
    for row in trials:
        groups.setdefault(row["arm_number"], []).append(row)
    return [
        schemas.Arm(
            number=number,
            label=rows[0]["arm"],
            seeds=[row["seed"] for row in rows],
            trials=[row["id"] for row in rows],
            statuses=counts(rows),
        )
        for number, rows in sorted(groups.items())
    ]


def metric_names(metrics: str) -> list[str]:
    """The columns of a comma-separated list."""
    return list(dict.fromkeys(word.strip() for word in metrics.split(",") if word.strip()))


def traces(
    store: Store,
    selection: Selection,
    metrics: Sequence[str],
    first: int | None,
    last: int | None,
    num_points: int,
) -> dict[str, Any]:
    """Series of every trial and metric, cut to the range and then sampled; see schemas.Traces."""
    if len(selection.trials) * len(metrics) * num_points > MAX_VALUES:
        raise bad_parameter(
            "points",
            f"{len(selection.trials)} trials x {len(metrics)} metrics x {num_points} points; "
            f"limit: {MAX_VALUES}",
        )
    if first is not None and last is not None and first > last:
        raise bad_parameter("from", f"from {first} is after to {last}")
    answers: list[dict[str, Any]] = []
    warnings: list[str] = []
    names: dict[str, None] = dict.fromkeys(STANDARD_COLUMNS)
    for row in selection.trials:
        recorded = store.read(selection.run, row, metrics)
        names.update(dict.fromkeys(recorded.names))
        warnings += recorded.warnings
        asked = metrics_in(metrics, recorded.names)
        shown = {name: recorded[name].cut(first, last) for name in asked}
        answers.append(trial_traces(row, recorded.last_step, shown, num_points))
    for metric in metrics:
        if not metrics_in([metric], list(names)):
            raise bad_parameter("metrics", f"unknown metric '{metric[:80]}'", list(names))
    series = [one for answer in answers for one in answer["series"]]
    places = [
        answer["first_nonfinite_step"] for answer in answers if answer["first_nonfinite_step"] is not None
    ]
    return {
        "run": selection.run["id"],
        "num_total": sum(one["num_total"] for one in series),
        "num_returned": sum(one["num_returned"] for one in series),
        "sampled": any(one["sampled"] for one in series),
        "last_step": max((answer["last_step"] for answer in answers), default=0),
        "first_nonfinite_step": min(places, default=None),
        "metrics": list(names),
        "warnings": warnings,
        "trials": answers,
    }


def metrics_in(metrics: Sequence[str], names: Sequence[str]) -> list[str]:
    """Names asked for, `prefix/*` replaced by the columns that it means; absent ones of the standard stay."""
    found: dict[str, None] = {}
    for metric in metrics:
        prefix = metric.removesuffix("*")
        if prefix == metric:
            wanted = [metric] if metric in names or metric in STANDARD_COLUMNS else []
        else:
            wanted = [name for name in names if name.startswith(prefix)]
        found.update(dict.fromkeys(wanted))
    return list(found)


def trial_traces(row: Row, last_step: int, shown: dict[str, Series], num_points: int) -> dict[str, Any]:
    """One trial's part of the answer; see schemas.TrialTraces."""
    series, places = [], []
    for name, whole in shown.items():
        kept, odd = whole.sampled(num_points), whole.nonfinite()
        values = kept.values.astype(float).tolist()
        if len(odd):
            values = [value if -1e308 < value < 1e308 else None for value in values]
            places += [
                {"metric": name, "step": step, "value": name_of(value)}
                for step, value in zip(odd.steps.tolist(), odd.values.tolist(), strict=True)
            ]
        series.append(
            {
                "metric": name,
                "num_total": len(whole),
                "num_returned": len(kept),
                "sampled": len(kept) < len(whole),
                "first_nonfinite_step": int(odd.steps[0]) if len(odd) else None,
                "step": kept.steps.tolist(),
                "value": values,
            }
        )
    return {
        "trial": row["id"],
        "arm": row["arm"],
        "arm_number": row["arm_number"],
        "seed": row["seed"],
        "status": row["status"],
        "last_step": last_step,
        "first_nonfinite_step": min((place["step"] for place in places), default=None),
        "series": series,
        "nonfinite": places,
    }
