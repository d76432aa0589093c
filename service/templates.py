"""Templates of the pages, with the words that they use; everything that is put in is escaped."""

import json
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from service import assets, shown

ENVIRONMENT = Environment(
    loader=FileSystemLoader(assets.PAGES),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
ENVIRONMENT.globals.update(asset=assets.url_of, style_sheet=(assets.PAGES / "style.css").read_text)
ENVIRONMENT.filters.update(
    number=shown.number,
    moment=shown.moment,
    ago=shown.ago,
    duration=shown.duration,
    setting=shown.setting,
    compact=lambda value: json.dumps(value, separators=(",", ":")),
)


def render(name: str, **values: Any) -> str:
    """A template filled in."""
    return ENVIRONMENT.get_template(name).render(values)
