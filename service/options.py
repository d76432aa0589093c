"""What a picture may be asked for: the query parameters of every plot, and their limits."""

from enum import StrEnum
from typing import Annotated

from fastapi import Query
from pydantic import BaseModel, ConfigDict, Field

from service.problems import bad_parameter

MAX_PIXELS = 8_000_000
MAX_LINES = 48


class Kind(StrEnum):
    png = "png"
    svg = "svg"
    pdf = "pdf"


class Band(StrEnum):
    none = "none"
    minmax = "minmax"
    ci95 = "ci95"


class Scale(StrEnum):
    linear = "linear"
    log = "log"
    symlog = "symlog"


class Axis(StrEnum):
    step = "step"
    tokens = "tokens"
    time = "time"


class ThemeName(StrEnum):
    light = "light"
    dark = "dark"
    print = "print"


class PictureOptions(BaseModel):
    """Parameters of a picture; every one has a default that suits a screen."""

    model_config = ConfigDict(populate_by_name=True)

    trials: str | None = Field(
        default=None, max_length=4000, description="Trial ids or numbers, by commas; all if absent"
    )
    where: list[Annotated[str, Field(max_length=200)]] = Field(
        default_factory=list, max_length=16, description="field:value of the trial's config; repeated: and"
    )
    group_by: str = Field(
        default="arm",
        max_length=100,
        description="`arm`, `trial`, or a config field whose values make the lines",
    )
    band: Band = Field(
        default=Band.minmax, description="Over the trials of a line; none: each trial its own line"
    )
    smooth: int = Field(
        default=0, ge=0, le=100_000, description="Steps of a trailing mean, drawn over the raw line"
    )
    yscale: Scale | None = Field(default=None, description="The plot's own scale if absent")
    x: Axis = Axis.step
    first: int | None = Field(default=None, alias="from", ge=0, le=2**31 - 1, description="First step shown")
    last: int | None = Field(default=None, alias="to", ge=0, le=2**31 - 1, description="Last step shown")
    clipped: bool = Field(default=False, description="Also the norm after clipping (gradnorm)")
    ymin: float | None = Field(default=None, ge=-1e30, le=1e30, allow_inf_nan=False)
    ymax: float | None = Field(default=None, ge=-1e30, le=1e30, allow_inf_nan=False)
    width: int = Field(default=1000, ge=200, le=4000, description="Pixels")
    height: int = Field(default=600, ge=150, le=4000, description="Pixels")
    dpi: int = Field(default=100, ge=40, le=400, description="Pixels an inch: the size of text and lines")
    theme: ThemeName = ThemeName.light
    title: str | None = Field(default=None, max_length=200)
    legend: bool = True

    def check(self) -> "PictureOptions":
        """Itself, or a 422 Problem where two parameters contradict each other."""
        if self.width * self.height > MAX_PIXELS:
            raise bad_parameter(
                "width", f"{self.width} x {self.height} pixels; limit: {MAX_PIXELS} pixels in all"
            )
        if self.width / self.dpi < 2 or self.height / self.dpi < 1.5:
            raise bad_parameter(
                "dpi", f"dpi {self.dpi} leaves no room in {self.width} x {self.height} pixels"
            )
        if self.first is not None and self.last is not None and self.first > self.last:
            raise bad_parameter("from", f"from {self.first} is after to {self.last}")
        if self.ymin is not None and self.ymax is not None:
            if self.ymin >= self.ymax:
                raise bad_parameter("ymin", f"ymin {self.ymin:g} is not below ymax {self.ymax:g}")
            if self.ymax - self.ymin < 1e-6 * max(abs(self.ymin), abs(self.ymax)):
                raise bad_parameter("ymin", f"ymin {self.ymin:g} and ymax {self.ymax:g} are too close")
        if self.yscale is Scale.log:
            for name, bound in (("ymin", self.ymin), ("ymax", self.ymax)):
                if bound is not None and bound <= 0:
                    raise bad_parameter(name, f"{name} {bound:g} is not above 0, as a log scale needs")
        return self


Options = Annotated[PictureOptions, Query()]
