"""Pages: the list of runs, a run or trial, and a comparison, rendered from what the API answers.

A page reads nothing by itself: it calls the functions that the routes call, and its scripts ask the
routes. Its whole state is in its URL, in the names that the API has for it; what it says is wrong
with a parameter is what the API says.
"""

from collections.abc import Callable, Sequence
from typing import Annotated, Any, get_args

from fastapi import APIRouter, FastAPI, Query, Request, Response
from fastapi.responses import RedirectResponse

from service import assets, chart, figures, shown, sparklines, views
from service.answers import caching, etag_of, selection_etag, unchanged
from service.context import Context, Ctx
from service.fields import ordered as ordered_by
from service.problem_pages import ProblemPages
from service.problems import bad_parameter
from service.routes import Id, RunStatus
from service.store import Selection
from service.templates import render

router = APIRouter(include_in_schema=False)
Row = dict[str, Any]
RUNS_A_PAGE = 50
TRIALS_A_PAGE = 500
RUN_STATUSES = get_args(RunStatus)
# Column of the table of trials -> words, what it says, field of the API's `sort`.
COLUMNS = (
    ("id", "Trial", "", "number"),
    ("arm", "Arm", "", "arm"),
    ("seed", "Seed", "", "seed"),
    ("status", "Status", "", "status"),
    ("step", "Step", "last recorded step", "step"),
    ("final_loss", "Final loss", "mean of the last hundredth of the steps", "summary.final_loss"),
    ("median", "Median norm", "median gradient norm of all steps", "summary.median_grad_norm"),
    ("peak", "Peak norm", "highest gradient norm of a single step", "summary.peak_grad_norm"),
    ("spikes", "Spikes", "steps far above their thousand predecessors", "summary.num_spikes_grad_norm"),
    ("clipped", "Clipped", "share of steps that were clipped", "summary.clipped_fraction"),
    ("pace", "Steps/s", "", "steps_per_second"),
)


def install(app: FastAPI) -> None:
    """Add the pages; call last, since a problem of anything else may have to become a page."""
    app.include_router(assets.router)
    app.include_router(chart.router)
    app.include_router(router)
    app.add_middleware(ProblemPages)


async def page(request: Request, context: Context, work: Callable[[], Row | Response]) -> Response:
    """The template that `work` names, filled in with its values, in a thread of the readers."""

    def rendered() -> Response:
        values = work()
        if isinstance(values, Response):
            return values
        content = render(values.pop("template"), **values).encode()
        etag = etag_of(content)
        return unchanged(request, etag) or Response(
            content, headers=caching(etag, False), media_type="text/html; charset=utf-8"
        )

    return await context.reads.run(rendered)


@router.get("/ui")
async def to_list() -> Response:
    return RedirectResponse("/", status_code=307)


@router.get("/")
async def list_page(
    request: Request,
    context: Ctx,
    status: Annotated[str, Query(max_length=20)] = "",
    study: Annotated[str, Query(max_length=200)] = "",
    cursor: Annotated[str | None, Query(max_length=200)] = None,
) -> Response:
    """Runs, newest first."""

    def work() -> Row:
        if status and status not in RUN_STATUSES:
            raise bad_parameter("status", f"unknown status '{status}'", RUN_STATUSES)
        content = views.runs_page(context.store, status or None, study or None, RUNS_A_PAGE, cursor, None)
        rows = [listed(context, run) for run in content["runs"]]
        return {
            "template": "runs.html",
            "rows": rows,
            "next": content["next"],
            "status": status,
            "study": study,
            "first_page": cursor is None,
            "filtered": bool(status or study or cursor),
            "statuses": RUN_STATUSES,
            "live": any(run["status"] in shown.LIVE for run in content["runs"]),
        }

    return await page(request, context, work)


def listed(context: Context, run: Row) -> Row:
    """A row of the list: what goes on is asked for its steps, what has ended is known by its counts."""
    counts = run["num_trials"] or {}
    if run["status"] in ("finished", "failed"):
        progress = shown.progress_by_counts(counts)
    else:
        progress = shown.progress_of(context.store.catalogue.trials(run["id"]))
    return {"run": run, "counts": counts, "progress": progress, "took": shown.took(run)}


@router.get("/ui/runs/{id}")
async def run_page(request: Request, context: Ctx, identifier: Id) -> Response:
    """A run, or one of its trials."""

    def work() -> Row | Response:
        selection = context.store.find(identifier)
        if not selection.by_name:  # a page that stays open goes on showing the run that it was opened for
            query = f"?{request.url.query}" if request.url.query else ""
            return RedirectResponse(
                f"/ui/runs/{selection.run['id']}{query}", 307, {"Cache-Control": "no-store"}
            )
        values = shared_by_both(context, request, selection)
        if selection.narrow:
            return values | trial_values(context, selection)
        return values | run_values(request, selection)

    return await page(request, context, work)


def shared_by_both(context: Context, request: Request, selection: Selection) -> Row:
    run = selection.run
    identifier = selection.trials[0]["id"] if selection.narrow else run["id"]
    subject = selection.trials[0] if selection.narrow else run
    return {
        "run": run,
        "counts": views.counts(selection.trials),
        "progress": shown.progress_of(selection.trials),
        "took": shown.took(subject),
        "notes": shown.notes_of(run, selection.trials),
        "figure": figures.figure(context.store, [selection], request.query_params, f"/runs/{identifier}"),
        "events": f"/runs/{identifier}/events" if subject["status"] in shown.LIVE else "",
    }


def run_values(request: Request, selection: Selection) -> Row:
    sort = request.query_params.get("sort", "number")
    ordered = ordered_by(selection.trials, sort) if selection.trials else []
    return {
        "template": "run.html",
        "columns": COLUMNS,
        "sort": sort,
        "trials": ordered[:TRIALS_A_PAGE],
        "num_trials": len(ordered),
        "difference": shown.difference(selection.trials),
        "reading": reading(selection),
    }


def trial_values(context: Context, selection: Selection) -> Row:
    trial = selection.trials[0]
    siblings = context.store.catalogue.trials(selection.run["id"])
    differing = shown.difference(siblings).fields
    places = [row["id"] for row in siblings]
    place = places.index(trial["id"]) if trial["id"] in places else 0
    return {
        "template": "trial.html",
        "trial": trial,
        "label": shown.arm_label(trial),
        "settings": shown.settings(trial, differing),
        "summary": shown.summary(trial),
        "before": places[place - 1] if place > 0 else None,
        "after": places[place + 1] if place + 1 < len(places) else None,
    }


def reading(selection: Selection) -> Row | None:
    """What the report says; None where this installation has none."""
    try:
        return views.report(selection)
    except ImportError:
        return None


@router.get("/ui/runs/{id}/spark.svg")
async def spark(request: Request, context: Ctx, identifier: Id) -> Response:
    """The small picture of the list."""

    def work() -> Response:
        selection = context.store.find(identifier)
        etag = selection_etag(context.store, selection, "spark")
        return unchanged(request, etag, selection.ended) or Response(
            sparklines.sparkline(context.store, selection),
            headers=caching(etag, selection.ended),
            media_type="image/svg+xml",
        )

    return await context.reads.run(work)


@router.get("/ui/compare")
async def compare_page(
    request: Request, context: Ctx, runs: Annotated[list[str] | None, Query(max_length=32)] = None
) -> Response:
    """The arms of several runs in one chart; checkboxes of the list arrive as `runs`, repeated."""

    def work() -> Row:
        given = ",".join(runs or ())
        names = chart.names_of(given) if given.strip(", ") else []
        selections = [context.store.find(name) for name in names]
        names = list(dict.fromkeys(name_of(one) for one in selections))
        values: Row = {"template": "compare.html", "names": names, "selections": selections}
        if not selections:
            recent = views.runs_page(context.store, None, None, RUNS_A_PAGE, None, None)["runs"]
            return values | {"recent": recent, "figure": None, "events": ""}
        every = [row for one in selections for row in one.trials]
        return values | {
            "figure": figures.figure(
                context.store, selections, request.query_params, "/compare", {"runs": ",".join(names)}
            ),
            "arms": compared(selections),
            "difference": shown.difference(every, several=True),
            "recent": views.runs_page(context.store, None, None, RUNS_A_PAGE, None, None)["runs"],
            "events": "",
            "live": any(row["status"] in shown.LIVE for row in every),
        }

    return await page(request, context, work)


def name_of(selection: Selection) -> str:
    return selection.trials[0]["id"] if selection.narrow else selection.run["id"]


def compared(selections: Sequence[Selection]) -> list[Row]:
    """A row of numbers for every arm of every run."""
    return [
        shown.arm_numbers(selection.run, [row for row in selection.trials if row["arm_number"] == arm.number])
        for selection in selections
        for arm in views.arms_of(selection.trials)
    ]
