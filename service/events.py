"""Server-sent events of a run: the progress of its trials while they go on, and its end.

    event: progress   the run's status and the trials that changed since the last event
    event: data       {trial id: step}: traces that have new points, up to that step
    event: end        the run's final status; then the stream closes

An event's id is the state that it leaves the client in, so that a client that comes back with
`Last-Event-ID` is told what changed since then and nothing twice, by any worker of the service.
"""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Header, Response
from sse_starlette import EventSourceResponse, ServerSentEvent

from service.answers import json_bytes
from service.context import Context, Ctx
from service.problems import Problem, problem_responses
from service.routes import Id
from service.store import Selection
from service.views import counts

router = APIRouter(tags=["runs"], responses=problem_responses(401, 404, 422, 503))
CODES = {
    "pending": "p",
    "running": "r",
    "finished": "f",
    "diverged": "d",
    "pruned": "u",
    "failed": "x",
    "lost": "l",
}
ENDED = ("finished", "failed", "interrupted")
SHOWN = (
    "id", "number", "arm", "seed", "status", "reason", "diverged_step", "step", "num_steps", "loss",
    "grad_norm", "steps_per_second",
)  # fmt: skip
EVENT = {
    "type": "object",
    "required": ["event", "data"],
    "properties": {
        "event": {"enum": ["progress", "data", "end", "problem"]},
        "data": {"type": "string", "description": "JSON"},
        "id": {"type": "string"},
    },
}
MAX_STATE = 3000  # characters that fit into a header with ease
State = dict[int, str]  # trial number -> status code and step


def state_of(selection: Selection) -> State:
    return {row["number"]: f"{CODES[row['status']]}{row['step']}" for row in selection.trials}


def identity(selection: Selection, state: State) -> str:
    """An event's id: the state itself, or its digest where that would be too long for a header."""
    text = "-".join(f"{number}{what}" for number, what in sorted(state.items()))
    whole = f"{selection.run['status']}.{text}"
    return whole if len(whole) <= MAX_STATE else "digest." + hashlib.sha256(whole.encode()).hexdigest()


def known_state(event_id: str) -> State:
    """The state that an event's id stands for; empty for one that says nothing."""
    state: State = {}
    for word in event_id.partition(".")[2].split("-"):
        number = word.rstrip("0123456789")[:-1]
        if number.isdigit() and len(number) < 8:
            state[int(number)] = word[len(number) :]
    return state


def news(selection: Selection, before: State) -> list[ServerSentEvent]:
    """The events that lead from a state to the present one."""
    state = state_of(selection)
    changed = [row for row in selection.trials if state[row["number"]] != before.get(row["number"])]
    if not changed:
        return []
    run = {
        "id": selection.run["id"],
        "status": selection.run["status"],
        "num_trials": counts(selection.trials),
    }
    trials = [{name: row[name] for name in SHOWN} for row in changed]
    grown = {
        row["id"]: row["step"]
        for row in changed
        if before.get(row["number"], "")[1:] != str(row["step"]) and row["step"]
    }
    events = []
    if grown:
        events.append(event("data", grown))
    # The id comes with the last event of a batch: a client cut off before it is told all of it again.
    events.append(event("progress", {"run": run, "trials": trials}, identity(selection, state)))
    return events


def event(kind: str, content: dict[str, Any], event_id: str | None = None) -> ServerSentEvent:
    return ServerSentEvent(json_bytes(content).decode(), event=kind, id=event_id)


def ended(selection: Selection) -> bool:
    """Whether no more events can come."""
    if selection.narrow:
        return selection.trials[0]["status"] not in ("pending", "running", "lost")
    return selection.run["status"] in ENDED


async def follow(
    context: Context, selection: Selection, last_event_id: str | None
) -> AsyncIterator[ServerSentEvent]:
    """Events until the run ends or the client goes; the database is asked once a period."""
    state = known_state(last_event_id or "")
    identifier = selection.name
    while True:
        for one in news(selection, state):
            yield one
        state = state_of(selection)
        if ended(selection):
            run = {"id": selection.run["id"], "status": selection.run["status"]}
            yield event("end", run, identity(selection, state))
            return
        await asyncio.sleep(context.settings.event_seconds)
        try:
            selection = await context.reads.run(lambda: context.store.find(identifier))
        except Exception as error:  # the client's own retry asks again, from where it was
            detail = error.detail if isinstance(error, Problem) else "the database can't be read now"
            yield event("problem", {"detail": detail})
            return


@router.get(
    "/runs/{id}/events",
    response_class=Response,
    responses={
        200: {"description": "Events", "content": {"text/event-stream": {"schema": EVENT}}},
        204: {"description": "It has ended and the client knows all of it"},
    },
)
async def get_events(
    context: Ctx, identifier: Id, last_event_id: Annotated[str | None, Header(max_length=5000)] = None
) -> Response:
    """Progress while it runs, as server-sent events; a run that has ended sends its state and ends."""
    selection = await context.reads.run(lambda: context.store.find(identifier))
    if ended(selection) and last_event_id == identity(selection, state_of(selection)):
        return Response(status_code=204)
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return EventSourceResponse(follow(context, selection, last_event_id), headers=headers, ping=15)
