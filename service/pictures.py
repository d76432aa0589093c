"""Pictures over HTTP: rendered in their own pool, kept in a bounded cache under their ETag."""

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response

from service import views
from service.answers import caching, etag_of, selection_etag, unchanged
from service.context import Context, Ctx
from service.curves import Arm, TrialTrace
from service.fields import check_field, fields_of, values_of
from service.options import MAX_LINES, Band, Kind, Options, PictureOptions
from service.problems import bad_parameter, problem_responses
from service.routes import Id
from service.store import Selection, Store

router = APIRouter(tags=["pictures"], responses=problem_responses(401, 404, 422, 503))
MEDIA_TYPES = {Kind.png: "image/png", Kind.svg: "image/svg+xml", Kind.pdf: "application/pdf"}
MAX_RUNS = 16
PICTURE: dict[int | str, dict[str, Any]] = {
    200: {"content": {kind: {} for kind in MEDIA_TYPES.values()}, "description": "The picture"}
}


@router.get("/runs/{id}/{plot}.{kind}", response_class=Response, responses=PICTURE)
async def get_picture(
    request: Request, context: Ctx, identifier: Id, plot: str, kind: Kind, options: Options
) -> Response:
    """A plot of a run or trial, as PNG, SVG or PDF."""
    options.check()

    def prepare() -> tuple[list[Selection], str]:
        check_plot(plot)
        selection = views.choose(context.store.find(identifier), options.trials, options.where)
        return [selection], selection_etag(context.store, selection, plot, kind.value, options)

    return await picture(request, context, plot, kind, options, prepare)


@router.get("/compare/{plot}.{kind}", response_class=Response, responses=PICTURE)
async def compare(
    request: Request,
    context: Ctx,
    plot: str,
    kind: Kind,
    runs: Annotated[
        str, Query(min_length=1, max_length=2000, description="Ids of runs or trials, by commas")
    ],
    options: Options,
) -> Response:
    """A plot of the arms of several runs in one picture."""
    options.check()
    names = list(dict.fromkeys(word.strip() for word in runs.split(",") if word.strip()))
    if not 1 <= len(names) <= MAX_RUNS:
        raise bad_parameter("runs", f"{len(names)} runs; limit: 1 to {MAX_RUNS}")

    def prepare() -> tuple[list[Selection], str]:
        check_plot(plot)
        found = [context.store.find(name) for name in names]
        selections = views.choose_among(found, options.trials, options.where)
        tags = [selection_etag(context.store, one, plot, kind.value, options) for one in selections]
        return selections, tags[0] if len(tags) == 1 else etag_of(tags)

    return await picture(request, context, plot, kind, options, prepare)


def check_plot(plot: str) -> None:
    """422 for a plot that there isn't; in a thread, since the first one imports what draws."""
    from service.plots import PLOTS

    if plot not in PLOTS:
        raise bad_parameter("plot", f"unknown plot '{plot[:80]}'", list(PLOTS))


async def picture(
    request: Request, context: Context, plot: str, kind: Kind, options: PictureOptions, prepare: Any
) -> Response:
    """From the cache if the same was drawn before, else from the pool of pictures."""
    selections, etag = await context.reads.run(prepare)
    ended = all(selection.ended for selection in selections)
    fresh = unchanged(request, etag, ended)
    if fresh is not None:
        return fresh
    content = context.pictures.get(etag)
    if content is None:
        content = await context.renders.shared(
            etag, lambda: draw(context.store, selections, plot, options, kind)
        )
        context.pictures.put(etag, content, len(content))
    return Response(content, headers=caching(etag, ended), media_type=MEDIA_TYPES[kind])


def draw(store: Store, selections: list[Selection], plot: str, options: PictureOptions, kind: Kind) -> bytes:
    """Read what the plot needs and draw it: the body of a picture, in a thread of the pool."""
    from service.plots import PLOTS, Scene, render

    columns = PLOTS[plot].columns
    if plot == "gradnorm" and not options.clipped:
        columns = ("grad_norm",)
    names = [selection.name for selection in selections]
    studies = {selection.run["study"] for selection in selections}
    name = f"{' and '.join(sorted(studies))} ({', '.join(names)})"
    traces = [
        (selection.run, TrialTrace(row, store.read(selection.run, row, columns)))
        for selection in selections
        for row in selection.trials
    ]
    warnings = [text for _, trace in traces for text in trace.recorded.warnings]
    return render(plot, Scene(name, arms(traces, options, PLOTS[plot].lines), warnings), options, kind)


def arms(
    traces: list[tuple[dict[str, Any], TrialTrace]], options: PictureOptions, limited: bool = True
) -> list[Arm]:
    """Trials as the lines they make; 422 with the limit where there are too many."""
    several = len({run["id"] for run, _ in traces}) > 1
    groups: dict[Any, Arm] = {}
    rows = [trace.row for _, trace in traces]
    if options.group_by not in ("arm", "trial"):
        check_field("group_by", options.group_by, rows)
    for run, trace in traces:
        row = trace.row
        if options.group_by == "arm":
            key: Any = (run["id"], row["arm_number"])
            label = row["arm"] or described(row)
            label = f"{run['id']}: {label}" if several else label
        elif options.group_by == "trial":
            key, label = row["id"], f"{row['arm'] or described(row)} · {row['id']}"
        else:
            values = values_of(options.group_by, fields_of(row))
            key = label = f"{options.group_by}={', '.join(map(str, values))}"
        groups.setdefault(key, Arm(label, [])).trials.append(trace)
    num_lines = len(traces) if options.band is Band.none else len(groups)
    if limited and num_lines > MAX_LINES:
        raise bad_parameter(
            "trials", f"{num_lines} lines; limit: {MAX_LINES}; narrow them by trials, where or group_by"
        )
    return list(groups.values())


def described(row: dict[str, Any]) -> str:
    """An arm's words where it has no label: what it sets."""
    words = (f"{name.rpartition('.')[2]}={value}" for name, value in row["overrides"].items())
    return ", ".join(words) or f"arm {row['arm_number']}"
