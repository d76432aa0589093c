"""Hands trials to Ray Tune, one at a time: those that are known, then those that a search suggests.

Ray's own grid copies every trial's settings several times over and its OptunaSearch leaves trials open
for ever after a NaN; this one keeps a queue, and what it knows lies in the catalogue.
"""

import json
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ray.tune.schedulers import AsyncHyperBandScheduler, FIFOScheduler, MedianStoppingRule, TrialScheduler
from ray.tune.search import Searcher

from study.config import StudyConfig, TrialConfig
from study.search import ENDED, Away, Search

if TYPE_CHECKING:
    from study.rows import Job

RUNGS = 8  # a scheduler judges no trial before an eighth of its steps


class JobSearcher(Searcher):
    """Suggests {"job": ...} for each job; `adopt` is told of jobs that come up as the search goes.

    At most `max_concurrent` trials are handed out at once (None: no limit but the cluster's); none is
    begun after `time_budget` seconds.
    """

    def __init__(
        self,
        jobs: Sequence["Job"],
        spec: Callable[["Job"], dict[str, Any]],
        *,
        search: "Search[Job] | None" = None,
        adopt: Callable[[Sequence["Job"]], None] = lambda _: None,
        max_concurrent: int | None = None,
        time_budget: float | None = None,
    ) -> None:
        super().__init__()
        self.queue, self.spec, self.search, self.adopt = deque(jobs), spec, search, adopt
        self.max_concurrent = max_concurrent
        self.ends_at = None if time_budget is None else time.monotonic() + time_budget
        self.running: dict[str, Job] = {}  # by Tune's id

    def __getstate__(self) -> dict[str, Any]:
        return {}  # Tune pickles what it was given; this lives in the driver alone

    def suggest(self, trial_id: str) -> Any:
        """{"job": ...}, None for not now, or FINISHED."""
        if self.out_of_time:
            return Searcher.FINISHED
        if self.max_concurrent is not None and len(self.running) >= self.max_concurrent:
            return None
        if not self.queue and self.search is not None:
            try:
                jobs = self.search.next()
            except Away:
                return None  # Tune asks again
            self.adopt(jobs)
            self.queue.extend(jobs)
        if not self.queue:
            return Searcher.FINISHED
        self.running[trial_id] = job = self.queue.popleft()
        return {"job": self.spec(job)}

    @property
    def out_of_time(self) -> bool:
        return self.ends_at is not None and time.monotonic() >= self.ends_at

    def points_left(self) -> int:
        """Points that a resume is to suggest; none where it was time that ended the search."""
        left = self.search.left if self.search is not None else 0
        if left and self.search is not None and self.out_of_time:
            self.search.notes.append(f"the time budget ended the search, {left} points before its end")
            return 0
        return left

    def on_trial_complete(
        self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False
    ) -> None:
        job = self.running.pop(trial_id, None)
        if job is None or self.search is None:
            return
        details = {"status": "failed"} if error or not result else json.loads(result["details"])
        self.search.ended(
            job.plan.trial_id(self.search.run_id),
            {
                # What had not ended when Tune says it is complete was stopped by a scheduler.
                "status": details["status"] if details["status"] in ENDED else "pruned",
                "summary": details.get("summary"),
                "config": job.plan.config.model_dump(),
            },
        )

    def save(self, checkpoint_path: str) -> None:
        """Nothing: a run is resumed from the catalogue."""

    def restore(self, checkpoint_path: str) -> None:
        """Nothing, as above."""


def scheduler(study: StudyConfig, steps: Sequence[int]) -> TrialScheduler:
    """Tune's scheduler that the study asks for, by the loss at equal steps; `steps` of the known jobs."""
    num_steps = max(steps, default=int(study.trial.get("steps", TrialConfig.model_fields["steps"].default)))
    grace = max(1, num_steps // RUNGS)
    common: dict[str, Any] = {
        "time_attr": "step",
        "metric": "objective",
        "mode": "min",
        "grace_period": grace,
    }
    if study.search.scheduler == "asha":
        return AsyncHyperBandScheduler(**common, max_t=num_steps)
    if study.search.scheduler == "median":
        # Without a time slice it would pause trials to try others, each at the cost of a restart.
        return MedianStoppingRule(**common, min_time_slice=sys.maxsize)
    return FIFOScheduler()
