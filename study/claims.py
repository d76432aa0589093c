"""Claims: sentences that a study puts to the test, and the verdicts that its runs allow.

    claims:
      - id: deepnorm-calmest
        say: DeepNorm keeps the lowest gradient norm
        metric: peak_grad_norm
        lower: {block: deepnorm}          # or higher, equal (with a tolerance)
        than: {block: pre}                # or a number
        source: the figure
      - {id: dies, say: plain scores overflow, diverges: {relaxation: none}}      # or converges
      - id: falls-with-depth
        say: the gradient of the last layer falls as 1 / sqrt(layers)
        metric: first_grad_norm/block_last.ffn
        scales_as: {over: num_layers, slope: -0.5, tolerance: 0.1}    # on two log axes
        where: {block: pre}               # narrows every selector of a claim

A verdict is `supported`, `contradicted`, `undecided` or `not_testable`. lower and higher are decided
by the paired p value (verdicts.py), corrected by Holm for the number of such claims; equal and
scales_as by whether the 95 % interval lies within the tolerance; diverges and converges by whether
Wilson's interval lies beyond one half, which takes four trials at least.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from study.glossary import metric_of
from study.selectors import Arm, flatten, known_fields, resolve, select, write
from study.verdicts import Verdict, decide, judge

__all__ = ["Claim", "Verdict", "check", "evaluate", "flatten", "parse"]

Selector = dict[str, Any]
RELATIONS = ("lower", "higher", "equal", "diverges", "converges", "scales_as")
NOT_NUMBERS = ("spike_steps_grad_norm", "spike_steps_loss", "diverged_reason")


class Scaling(BaseModel):
    """A power law: metric ~ over ** slope."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    over: str  # a numeric field
    slope: float
    tolerance: float = Field(0.1, gt=0)  # of the slope, absolute


class Claim(BaseModel):
    """One sentence about arms, as a study file has it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str = Field(pattern=r"^[a-z0-9][a-z0-9-]*$")
    say: str
    metric: str | None = None
    lower: Selector | None = None
    higher: Selector | None = None
    equal: Selector | None = None
    diverges: Selector | None = None
    converges: Selector | None = None
    scales_as: Scaling | None = None
    than: Selector | float | None = None
    where: Selector = {}
    tolerance: float | None = Field(None, gt=0)  # of `than`, relative; absolute where that is 0
    source: str = ""

    @property
    def relation(self) -> str:
        return next(name for name in RELATIONS if getattr(self, name) is not None)

    @model_validator(mode="after")
    def _is_whole(self) -> "Claim":
        given = [name for name in RELATIONS if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"needs one of {', '.join(RELATIONS)}; has {', '.join(given) or 'none'}")
        compares = given[0] in ("lower", "higher", "equal")
        if compares != (self.than is not None):
            raise ValueError(f"'{given[0]}' {'needs' if compares else 'takes no'} 'than'")
        if (given[0] == "equal") != (self.tolerance is not None):
            raise ValueError("'equal' needs a tolerance, and nothing else takes one")
        if (self.metric is None) != (given[0] in ("diverges", "converges")):
            raise ValueError(f"'{given[0]}' {'needs a' if self.metric is None else 'takes no'} metric")
        if self.metric in NOT_NUMBERS:
            raise ValueError(f"metric '{self.metric}' is not a number")
        if self.metric is not None:
            metric_of(self.metric)
        return self


def parse(raw: Iterable[Mapping[str, Any] | Claim]) -> list[Claim]:
    """The claims of a study file. ValueError that names the claim and what is wrong with it."""
    claims: list[Claim] = []
    for place, entry in enumerate(raw):
        name = entry.id if isinstance(entry, Claim) else entry.get("id", f"number {place + 1}")
        try:
            claims.append(entry if isinstance(entry, Claim) else Claim.model_validate(entry))
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(str(part) for part in first["loc"])
            problem = first["msg"].removeprefix("Value error, ") + (f" ({key})" if key else "")
            raise ValueError(f"claim '{name}': {problem}") from None
    doubles = [claim.id for claim in claims if [other.id for other in claims].count(claim.id) > 1]
    if doubles:
        raise ValueError(f"claim '{doubles[0]}': there are several with this id")
    return claims


def check(claims: Iterable[Mapping[str, Any] | Claim], arms: Sequence[Arm]) -> list[Claim]:
    """The claims, each known to be about arms that the run has; needs no results yet.

    ValueError that names the claim, the selector and the arms.
    """
    parsed = parse(claims)
    for claim in parsed:
        try:
            _sides(claim, arms)
        except ValueError as error:
            raise ValueError(f"claim '{claim.id}': {error}") from None
    return parsed


def _sides(claim: Claim, arms: Sequence[Arm]) -> tuple[list[Arm], list[Arm]]:
    arms = select(claim.where, arms)
    if claim.scales_as is not None:
        over = resolve(claim.scales_as.over, known_fields(arms))
        if len({str(arm["fields"].get(over)) for arm in arms}) < 2:
            raise ValueError(f"'{over}' is the same in every arm; scales_as needs at least two values")
        for arm in arms:
            value = arm["fields"].get(over)
            if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
                raise ValueError(f"scales_as needs positive numbers; '{over}' is {value} in {arm['label']}")
        return arms, []
    left = select(getattr(claim, claim.relation), arms)
    if not isinstance(claim.than, Mapping):
        return left, []
    right = [arm for arm in select(claim.than, arms) if arm not in left]
    if not right:
        raise ValueError(f"{write(claim.than)} selects no arm but those that it is compared with")
    return left, right


def evaluate(claims: Iterable[Mapping[str, Any] | Claim], arms: Sequence[Arm]) -> list[Verdict]:
    """A verdict for each claim, in their order. Same errors as `check`.

    Arms: {label, fields (of `flatten`), trials: [{seed, status, summary, no_ops}]}; `no_ops` names
    the variants that change nothing in the trial, as fields or in sentences that begin with them.
    """
    return decide([judge(claim, *_sides(claim, arms)) for claim in check(claims, arms)])
