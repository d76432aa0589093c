"""Runs, trials and traces over HTTP: GET only."""

from typing import Annotated, Literal

from fastapi import APIRouter, Path, Query, Request, Response

from service import schemas, views
from service.answers import json_answer, selection_etag, unchanged
from service.context import Ctx
from service.problems import problem_responses

router = APIRouter(tags=["runs"], responses=problem_responses(401, 404, 422, 503))
Id = Annotated[str, Path(alias="id", description="A run's id, `latest`, or a trial's id", max_length=80)]
Where = Annotated[list[Annotated[str, Query(max_length=200)]] | None, Query(max_length=16)]
Fields = Annotated[
    str | None, Query(max_length=1000, description="Names of fields, by commas; all if absent")
]
RunStatus = Literal["pending", "running", "finished", "failed", "interrupted", "lost"]
MAX_STEP = 2**31 - 1


@router.get("/runs", response_model=schemas.RunPage)
async def list_runs(
    request: Request,
    context: Ctx,
    status: RunStatus | None = None,
    study: Annotated[str | None, Query(max_length=200)] = None,
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
        return json_answer(request, views.run_detail(context.store, selection))

    return await context.reads.run(work)


@router.get("/runs/{id}/traces", response_model=schemas.Traces)
async def get_traces(
    request: Request,
    context: Ctx,
    identifier: Id,
    metrics: Annotated[str, Query(min_length=1, max_length=2000)] = "loss,grad_norm",
    trials: Annotated[str | None, Query(max_length=4000)] = None,
    where: Where = None,
    first: Annotated[int | None, Query(alias="from", ge=0, le=MAX_STEP)] = None,
    last: Annotated[int | None, Query(alias="to", ge=0, le=MAX_STEP)] = None,
    points: Annotated[int, Query(ge=4, le=50_000, description="Finite points a series")] = 2000,
) -> Response:
    """Traces, with the min and max of every bucket and every non-finite place."""

    def work() -> Response:
        selection = views.choose(context.store.find(identifier), trials, where or [])
        etag = selection_etag(context.store, selection, "traces", metrics, first, last, points)
        fresh = unchanged(request, etag, selection.ended)
        if fresh is not None:
            return fresh
        names = views.metric_names(metrics)
        content = views.traces(context.store, selection, names, first, last, points)
        return json_answer(request, content, selection.ended, etag)

    return await context.reads.run(work)
