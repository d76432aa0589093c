"""The chart of a page: which metrics and settings its controls offer, and the picture of its state.

Controls have the names of the API's parameters, so that a page's URL, its chart's questions and the
links to its pictures say the same; nothing is checked here, the API does it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlencode

from starlette.datastructures import QueryParams

from service import shown
from service.options import MAX_LINES
from service.store import STANDARD_COLUMNS, Selection, Store

PICTURE_PARAMETERS = (
    "trials", "where", "group_by", "band", "smooth", "yscale", "x", "from", "to", "clipped", "ymin", "ymax",
)  # fmt: skip
DEFAULT_METRIC = "grad_norm"
MAX_FIELDS, MAX_VALUES = 30, 100
PEEKED = 3  # trials whose recorded columns are looked up for the list of metrics
FEWER = 12  # arms shown at first where a picture can't hold all


@dataclass(frozen=True)
class Choice:
    """A metric or picture that can be chosen."""

    value: str  # column of the trace, or name of a plot that is no line of a column
    title: str
    plot: str  # "" where no picture draws it
    interactive: bool
    ylabel: str = ""
    yscale: str = "linear"
    from_zero: bool = False


@dataclass(frozen=True)
class Figure:
    """What the template of a chart needs."""

    base: str  # of the API: /runs/<id> or /compare
    fixed: dict[str, str]  # parameters that are not for the reader to change
    choices: list[Choice]
    chosen: Choice
    given: Mapping[str, str]
    where: list[str]
    group_fields: list[str]
    conditions: list[str]
    cycles: dict[str, Sequence[str]]
    narrow: bool
    single_seed: bool
    hint: str = ""
    query: dict[str, Any] = field(default_factory=dict)

    def picture(self, kind: str) -> str:
        """URL of the picture of this state; that of the gradient norm where the metric has none."""
        query = urlencode(self.query | self.fixed, doseq=True)
        return f"{self.base}/{self.chosen.plot or 'gradnorm'}.{kind}{'?' + query if query else ''}"

    def export(self, form: str) -> str:
        return f"{self.base}/traces?format={form}"


def figure(
    store: Store,
    selections: Sequence[Selection],
    given: QueryParams,
    base: str,
    fixed: dict[str, str] | None = None,
) -> Figure:
    """The chart of these runs in the state that a URL describes."""
    from service.style import THEMES

    trials = [row for one in selections for row in one.trials]
    choices = choices_of(store, selections)
    asked = given.get("metric", DEFAULT_METRIC)
    chosen = next((one for one in choices if asked in (one.value, one.plot)), choices[0])
    difference = shown.difference(trials)
    values = {name: given[name] for name in PICTURE_PARAMETERS if name != "where" and given.get(name)}
    where = [condition for condition in given.getlist("where") if condition]
    hint = ""
    if "trials" not in values and "group_by" not in values and not where:
        hint, preset = fewer(trials)
        values |= preset
    narrow = all(one.narrow for one in selections)
    return Figure(
        base=base,
        fixed=fixed or {},
        choices=choices,
        chosen=chosen,
        given={
            **dict.fromkeys(PICTURE_PARAMETERS, ""),
            **values,
            "view": given.get("view", ""),
            "hide": given.get("hide", ""),
        },
        where=where,
        group_fields=difference.fields[:MAX_FIELDS],
        conditions=conditions_of(difference),
        cycles={name: THEMES[name].cycle for name in ("light", "dark")},
        narrow=narrow,
        single_seed=len({row["seed"] for row in trials}) <= 1,
        hint=hint,
        query=values | ({"where": where} if where else {}),
    )


def choices_of(store: Store, selections: Sequence[Selection]) -> list[Choice]:
    """Plots that are lines of a column, then further columns, then plots that only a picture shows."""
    from service.plots import PLOTS, lines

    drawn, pictures = [], []
    for name, plot in PLOTS.items():
        if plot.draw is lines:
            drawn.append(
                Choice(plot.columns[0], plot.title, name, True, plot.ylabel, plot.yscale, plot.from_zero)
            )
        else:
            pictures.append(Choice(name, plot.title, name, False))
    peeked = [(one.run, row) for one in selections for row in one.trials if row["step"]][:PEEKED]
    recorded = [name for run, row in peeked for name in store.read(run, row, ()).names]
    further = [
        Choice(name, name, "", True, name)
        for name in dict.fromkeys([*STANDARD_COLUMNS, *recorded])
        if name not in [choice.value for choice in drawn]
    ]
    return [*drawn, *further, *pictures]


def conditions_of(difference: shown.Difference) -> list[str]:
    """`field:value` for everything in which arms differ, for the filter's list of suggestions."""
    found = {
        f"{name}:{values[place]}": None
        for place, name in enumerate(difference.fields)
        for _, _, values in difference.rows
    }
    return list(found)[:MAX_VALUES]


def fewer(trials: Sequence[dict[str, Any]]) -> tuple[str, dict[str, str]]:
    """What to show at first where a picture can't hold every arm: those with the lowest final loss."""
    arms: dict[Any, list[dict[str, Any]]] = {}
    for row in trials:
        arms.setdefault((row["run_id"], row["arm_number"]), []).append(row)
    if len(arms) <= MAX_LINES:
        return "", {}

    def loss(rows: list[dict[str, Any]]) -> tuple[bool, float]:
        value = (rows[0]["summary"] or {}).get("final_loss")
        return value is None, value or 0.0

    best = sorted(arms.values(), key=loss)[:FEWER]
    names = ",".join(row["id"] for rows in best for row in rows)
    hint = f"{len(arms)} arms: at first the {FEWER} with the lowest final loss; choose others by filter or trials"
    return hint, {"trials": names}
