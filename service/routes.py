"""Runs, trials and traces over HTTP: GET only."""

from collections.abc import AsyncIterator, Iterator
from typing import Annotated, Literal

from fastapi import APIRouter, Path, Query, Request, Response
from fastapi.responses import StreamingResponse

from service import exports, schemas, views
from service.answers import caching, etag_of, json_answer, selection_etag, unchanged
from service.context import Ctx
from service.exports import Format
from service.problems import problem_responses

router = APIRouter(tags=["runs"], responses=problem_responses(401, 404, 422, 503))
Id = Annotated[str, Path(alias="id", description="A run's id, `latest`, or a trial's id", max_length=80)]
Where = Annotated[list[Annotated[str, Query(max_length=200)]] | None, Query(max_length=16)]
Fields = Annotated[
    str | None, Query(max_length=1000, description="Names of fields, by commas; all if absent")
]
RunStatus = Literal["pending", "running", "finished", "failed", "interrupted", "lost"]
ReportFormat = Literal["json", "md"]
DEFAULT_METRICS = ["loss", "grad_norm"]
MAX_STEP = 2**31 - 1


@router.get("/runs", response_model=schemas.RunPage)
async def list_runs(
    request: Request,
    context: Ctx,
    status: RunStatus | None = None,
    study: Annotated[str | None, Query(max_length=200, pattern=r"^[^\x00]*$")] = None,
    limit: Annotated[int, Query(ge=1, le=500)] = 50,
    cursor: Annotated[str | None, Query(max_length=200, description="`next` of the page before")] = None,
    fields: Fields = None,
) -> Response:
    """Runs, newest first."""

    def work() -> Response:
        wanted = views.field_names(fields, schemas.Run)
        page = views.runs_page(context.store, status, study, limit, cursor, wanted)
        return json_answer(request, page)

    return await context.reads.run(work)


@router.get("/runs/{id}", response_model=schemas.RunDetail | schemas.TrialDetail)
async def get_run(request: Request, context: Ctx, identifier: Id) -> Response:
    """A run with its arms and trials; or one trial."""

    def work() -> Response:
        selection = context.store.find(identifier)
        if selection.narrow:
            row = selection.trials[0]
            trial = schemas.TrialDetail(**views.known(schemas.TrialDetail, row))
            return json_answer(request, trial, selection.ended)
        return json_answer(request, views.run_detail(selection), selection.ended)

    return await context.reads.run(work)


@router.get("/runs/{id}/trials", response_model=schemas.TrialPage)
async def list_trials(
    request: Request,
    context: Ctx,
    identifier: Id,
    where: Where = None,
    sort: Annotated[str, Query(max_length=200, description="A field; `-field` from the largest")] = "number",
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    cursor: Annotated[str | None, Query(max_length=80, description="`next` of the page before")] = None,
    fields: Fields = None,
) -> Response:
    """A run's trials with their configs and numbers, filtered by any field."""

    def work() -> Response:
        wanted = views.field_names(fields, schemas.Trial)
        selection = views.choose(context.store.find(identifier), None, where or [])
        page = views.trials_page(selection, sort, limit, cursor, wanted)
        return json_answer(request, page, selection.ended)

    return await context.reads.run(work)


@router.get(
    "/runs/{id}/report",
    responses={
        200: {
            "description": "The reading",
            "content": {"application/json": {"schema": {"type": "object"}}, "text/markdown": {}},
        }
    },
)
async def get_report(
    request: Request,
    context: Ctx,
    identifier: Id,
    form: Annotated[ReportFormat, Query(alias="format")] = "json",
) -> Response:
    """What the numbers say, in sentences and tables, and how sure they are."""

    def work() -> Response:
        selection = context.store.find(identifier)
        report = views.report(selection)
        if form == "json":
            return json_answer(request, report, selection.ended)
        text = views.report_markdown(report).encode()
        etag = etag_of(text)
        return unchanged(request, etag, selection.ended) or Response(
            text, headers=caching(etag, selection.ended), media_type="text/markdown; charset=utf-8"
        )

    return await context.reads.run(work)


@router.get(
    "/runs/{id}/traces",
    response_model=schemas.Traces,
    responses={200: {"content": {kind.partition(";")[0]: {} for kind in exports.MEDIA_TYPES.values()}}},
)
async def get_traces(
    request: Request,
    context: Ctx,
    identifier: Id,
    metrics: Annotated[
        str | None,
        Query(min_length=1, max_length=2000, description="Columns, by commas; `prefix/*` for a group"),
    ] = None,
    trials: Annotated[str | None, Query(max_length=4000, description="Ids or numbers, by commas")] = None,
    where: Where = None,
    first: Annotated[int | None, Query(alias="from", ge=0, le=MAX_STEP)] = None,
    last: Annotated[int | None, Query(alias="to", ge=0, le=MAX_STEP)] = None,
    points: Annotated[int, Query(ge=4, le=50_000, description="Finite points a series")] = 2000,
    form: Annotated[
        exports.Format, Query(alias="format", description="All but json: every step")
    ] = Format.json,
) -> Response:
    """Traces: the min and max of every bucket and every non-finite place; or whole, as a file."""
    names = views.metric_names(metrics) if metrics is not None else None

    def work() -> Response | tuple[Iterator[bytes], dict[str, str]]:
        selection = views.choose(context.store.find(identifier), trials, where or [])
        etag = selection_etag(context.store, selection, "traces", names, first, last, points, form.value)
        fresh = unchanged(request, etag, selection.ended)
        if fresh is not None:
            return fresh
        if form is Format.json:
            content = views.traces(context.store, selection, names or DEFAULT_METRICS, first, last, points)
            return json_answer(request, content, selection.ended, etag)
        schema = exports.schema_of(context.store, selection, names)
        pieces = exports.stream(context.store, selection, schema, form, first, last)
        filename = f"{selection.name}.{form.value}"
        headers = {"Content-Disposition": f'attachment; filename="{filename}"'}
        return pieces, caching(etag, selection.ended) | headers

    answer = await context.reads.run(work)
    if isinstance(answer, Response):
        return answer
    pieces, headers = answer

    async def body() -> AsyncIterator[bytes]:
        while (piece := await context.reads.run(lambda: next(pieces, None))) is not None:
            yield piece

    return StreamingResponse(body(), headers=headers, media_type=exports.MEDIA_TYPES[form])
