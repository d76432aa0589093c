"""The search: Optuna suggests points, every point is run with all seeds, its value is told back.

One Optuna study an arm lies in the catalogue's database, named by the run: optuna-dashboard opens it,
a resumed run goes on with its history. An Optuna trial keeps as `point` and `arm_numbers` which trials
of the run are its. Knows no Ray: searcher.py hands the trials to Tune.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import optuna
import sqlalchemy as sa
from optuna.trial import TrialState

from study.config import ConfigError, StudyConfig, trial_config
from study.data import DataError
from study.distributions import Space
from study.objectives import Row, objectives_of, values_of
from study.samplers import make_sampler
from study.space import MAX_REFUSED, Plan, first_points, named_arms, point_arms, seeds

ENDED = ("finished", "diverged", "pruned", "failed")
ATTEMPTS = 5  # at the database, in a row
PAUSE_SECONDS = 0.1  # between them
NEW = -1  # a suggestion that is no point of the run yet
LOCK_SECONDS = 15.0  # how long SQLite waits for another writer
Job = TypeVar("Job")
optuna.logging.set_verbosity(optuna.logging.WARNING)


class Away(RuntimeError):
    """The database can't be reached now; nothing is lost, and the call is to be made again."""


@dataclass
class Point:
    """A suggestion that is being run."""

    arm: int  # of the study's arms
    number: int  # of its Optuna trial
    trial_ids: list[str]
    rows: dict[str, Row] = field(default_factory=dict)  # of its trials that have ended
    told_failed: bool = False  # before a resume


class Search(Generic[Job]):
    """Suggests the trials of a run and learns from them.

    `make` turns a Plan into what is to be run; where it raises ConfigError, the point is told as failed
    and another asked for. `rows`: a resumed run's trials. ConfigError if their history is gone.
    """

    def __init__(
        self, study: StudyConfig, run_id: str, url: str | None, make: Callable[[Plan], Job], rows: Sequence[Row] = ()
    ) -> None:  # fmt: skip
        self.study, self.run_id, self.make = study, run_id, make
        self.space = Space(study.space)
        self.objectives = objectives_of(study.search)
        self.arms = named_arms(study)
        self.labels = {row["arm"] for row in rows}
        self.notes: list[str] = []
        self.width = len(study.search.lr_sweep or [0])  # arms a point
        self._open: dict[str, Point] = {}  # by trial id
        self._untold: list[Point] = []
        self._begun: list[tuple[int, int, int]] = []  # arm, Optuna's id of its trial, point: to be planned
        self._num_trials = [0] * len(self.arms)  # of Optuna's, in every state: reading them all takes 10 ms
        self._counted: list[set[int]] = [set() for _ in self.arms]  # numbers of the points of each arm
        self._given_up: set[int] = set()
        self._was_away = False
        self._problem = ""
        with self._database():
            self._storage = _storage(url)
            self._studies = [self._study_of(arm, bool(rows)) for arm in range(len(self.arms))]
            self._next_point = self._recover(rows)

    def _study_of(self, arm: int, has_rows: bool) -> optuna.Study:
        label = self.arms[arm][0] or f"arm {arm}"
        name = self.run_id if len(self.arms) == 1 else f"{self.run_id}: {label}"[:500]
        study = optuna.create_study(
            study_name=name,
            storage=self._storage,
            load_if_exists=True,
            directions=["minimize" if one.mode == "min" else "maximize" for one in self.objectives],
        )
        study.set_metric_names([one.metric for one in self.objectives])
        if not has_rows:
            for params in first_points(self.study, self.space):
                study.enqueue_trial(params, skip_if_exists=True)
        elif not study.get_trials(deepcopy=False):
            raise ConfigError(f"the search history of run '{self.run_id}' is gone: no Optuna study '{name}'")
        return study

    def _recover(self, rows: Sequence[Row]) -> int:
        """Find what was suggested and not told; returns the number of the next point."""
        by_id = {row["id"]: row for row in rows}
        highest = max((row["arm_number"] // self.width for row in rows), default=-1)
        for arm in range(len(self.arms)):
            self._find_cut_off(arm)
            for trial in self._trials(arm):
                if "point" not in trial.user_attrs:
                    continue
                number = trial.user_attrs["point"]
                highest = max(highest, number)
                self._counted[arm].add(number)
                point = Point(arm, trial.number, self._trial_ids(number))
                if all(trial_id in by_id for trial_id in point.trial_ids):
                    self._reopen(point, [by_id[trial_id] for trial_id in point.trial_ids], trial.state)
                elif trial.state == TrialState.RUNNING:
                    self._begun.append((arm, trial._trial_id, number))
        self._tell_all()
        return highest + 1

    def _find_cut_off(self, arm: int) -> None:
        """Suggestions that Optuna made and that were never marked as points: they are gone on with."""
        known = {trial_id for _, trial_id, _ in self._begun}
        trials = self._trials(arm)
        self._num_trials[arm] = len(trials)
        for trial in trials:
            cut_off = trial.state == TrialState.RUNNING and "point" not in trial.user_attrs
            if cut_off and trial._trial_id not in known:
                self._begun.append((arm, trial._trial_id, NEW))

    def _reopen(self, point: Point, rows: Sequence[Row], state: TrialState) -> None:
        failed = any(row["status"] == "failed" for row in rows)
        if state != TrialState.RUNNING and not (state == TrialState.FAIL and failed):
            return
        point.rows = {row["id"]: row for row in rows if row["status"] in ENDED and row["status"] != "failed"}
        point.told_failed = state == TrialState.FAIL
        self._open |= dict.fromkeys(point.trial_ids, point)
        if len(point.rows) == len(point.trial_ids):
            self._untold.append(point)

    @property
    def left(self) -> int:
        """How many points are still to come from here; those that are being run are not among them."""
        known = sum(number != NEW for _, _, number in self._begun)
        return known + sum(self._lacking(arm) for arm in range(len(self.arms)))

    def _lacking(self, arm: int) -> int:
        wanted = self.study.search.num_samples or 0
        return 0 if arm in self._given_up else wanted - len(self._counted[arm])

    def next(self) -> list[Job]:
        """The trials of the next point; empty when all have been suggested. Raises Away."""
        with self._database():
            self._tell_all()
            for arm in range(len(self.arms)) if self._was_away else ():
                self._find_cut_off(arm)
            self._was_away = False
            while self._begun:
                arm, trial_id, number = self._begun[-1]
                jobs = self._take(arm, optuna.Trial(self._seeded(arm), trial_id), number)
                self._begun.pop()
                if jobs:
                    return jobs
            return self._suggest()

    def _suggest(self) -> list[Job]:
        refused, problem = 0, ""
        while (arm := self._arm_in_turn()) is not None:
            trial = self._seeded(arm).ask()
            self._num_trials[arm] = max(self._num_trials[arm], trial.number + 1)
            self._begun.append((arm, trial._trial_id, NEW))
            jobs = self._take(arm, trial, NEW)
            self._begun.pop()
            if jobs:
                return jobs
            refused, problem = refused + 1, self._problem
            if refused == MAX_REFUSED:
                self._given_up.add(arm)
                refused = 0
                self.notes.append(
                    f"the search ended after {len(self._counted[arm])} of "
                    f"{self.study.search.num_samples} points: {MAX_REFUSED} suggestions in a row "
                    f"could not be built ({problem})"
                )
        return []

    def _seeded(self, arm: int) -> optuna.Study:
        self._studies[arm].sampler = make_sampler(self.study.search, self._num_trials[arm])
        return self._studies[arm]

    def _trials(self, arm: int) -> list[optuna.trial.FrozenTrial]:
        return self._studies[arm].get_trials(deepcopy=False)

    def _arm_in_turn(self) -> int | None:
        lacking = [arm for arm in range(len(self.arms)) if self._lacking(arm)]
        return max(lacking, key=self._lacking, default=None)

    def _take(self, arm: int, trial: optuna.Trial, number: int) -> list[Job]:
        """The trials of what Optuna suggests; empty if it can't be built, which Optuna is then told."""
        number = self._next_point if number == NEW else number
        values = self.space.draw(trial)
        try:
            plans = list(self._plans(arm, values, number))
            jobs = [self.make(plan) for plan in plans]
        except (ConfigError, DataError) as error:
            self._problem = str(error)
            trial.set_user_attr("refused", self._problem)
            self._studies[arm].tell(trial, state=TrialState.FAIL)
            return []
        # `point` last: with it, the trial counts as one that was suggested.
        trial.set_user_attr("arm_numbers", sorted({plan.arm_number for plan in plans}))
        trial.set_user_attr("point", number)
        self._next_point = max(self._next_point, number + 1)
        self._counted[arm].add(number)
        self.labels |= {plan.arm for plan in plans}
        point = Point(arm, trial.number, [plan.trial_id(self.run_id) for plan in plans])
        self._open |= dict.fromkeys(point.trial_ids, point)
        return jobs

    def _plans(self, arm: int, values: Mapping[str, Any], number: int) -> Iterator[Plan]:
        label, overrides = self.arms[arm]
        for index, (name, settings) in enumerate(point_arms(self.study, label, overrides, values)):
            arm_number = number * self.width + index
            unique = name if name not in self.labels else f"{name} #{arm_number}"
            for seed_index, seed in enumerate(seeds(self.study)):
                config = trial_config(self.study.trial, settings | {"seed": seed}, f"arm '{name}'")
                trial_number = arm_number * self.study.search.seeds + seed_index
                yield Plan(trial_number, unique, arm_number, settings, config)

    def _trial_ids(self, number: int) -> list[str]:
        count = self.width * self.study.search.seeds
        return [f"{self.run_id}_{number * count + index:05d}" for index in range(count)]

    def ended(self, trial_id: str, row: Row) -> None:
        """Learn how a trial ended (`status`, `summary`, `config`); never raises Away."""
        point = self._open.get(trial_id)
        if point is None:
            return
        point.rows[trial_id] = row
        if len(point.rows) == len(point.trial_ids):
            self._untold.append(point)
            try:
                self.settle()
            except Away:
                return  # told with the next one

    def settle(self) -> None:
        """Tell Optuna what it hasn't been told for want of a database; raises Away."""
        with self._database():
            self._tell_all()

    def _tell_all(self) -> None:
        while self._untold:
            self._tell(self._untold[-1])
            point = self._untold.pop()
            for trial_id in point.trial_ids:
                self._open.pop(trial_id, None)

    def _tell(self, point: Point) -> None:
        study = self._studies[point.arm]
        rows = [point.rows[trial_id] for trial_id in point.trial_ids]
        values = values_of(self.objectives, rows)
        if point.told_failed and values is not None:
            # A failed trial that a resume completed: what Optuna was told can't be taken back.
            told = self._trials(point.arm)[point.number]
            kept: dict[str, Any] = {
                "params": told.params,
                "distributions": told.distributions,
                "user_attrs": told.user_attrs,
            }
            study.add_trial(optuna.trial.create_trial(**kept, values=values))
            self._num_trials[point.arm] += 1
        elif values is not None:
            study.tell(point.number, values, skip_if_finished=True)
        else:
            failed = any(row["status"] == "failed" for row in rows)
            state = TrialState.FAIL if failed else TrialState.PRUNED
            study.tell(point.number, state=state, skip_if_finished=True)

    @contextmanager
    def _database(self) -> Iterator[None]:
        """Turns what a database does when it is away or locked into Away."""
        try:
            yield
        except (optuna.exceptions.StorageInternalError, sa.exc.DBAPIError) as error:
            self._was_away = True
            raise Away(str(error.__cause__ or error)) from error


def _storage(url: str | None) -> optuna.storages.BaseStorage:
    """Optuna's storage in the database at `url`; in memory without one."""
    if url is None:
        return optuna.storages.InMemoryStorage()
    options: dict[str, Any] = {"pool_pre_ping": True}
    if sa.make_url(url).get_backend_name() == "sqlite":
        options["connect_args"] = {"timeout": LOCK_SECONDS}
    for attempt in range(ATTEMPTS):
        try:
            return optuna.storages.RDBStorage(url, engine_kwargs=options)
        except (optuna.exceptions.StorageInternalError, sa.exc.DBAPIError):
            # Two runs that make Optuna's tables at once: the second finds them there.
            if attempt == ATTEMPTS - 1:
                raise
            time.sleep(PAUSE_SECONDS * 2**attempt)
    raise AssertionError
