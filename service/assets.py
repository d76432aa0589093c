"""Files that pages need, under URLs that change with their content: style, scripts, plotly.

Nothing comes from another host: plotly's JavaScript is the one in its wheel. A name from a URL is
only looked up in a table, never made a path.
"""

import gzip
import hashlib
import threading
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Request, Response
from fastapi import Path as PathParameter

from service.answers import caching, unchanged
from service.problems import Problem

router = APIRouter(include_in_schema=False)
PAGES = Path(__file__).parent / "pages"
MEDIA_TYPES = {".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8"}


@dataclass(frozen=True)
class Asset:
    """A file as it is served."""

    path: Path
    version: str
    media_type: str

    @cached_property
    def packed(self) -> bytes:
        return gzip.compress(self.path.read_bytes(), 6, mtime=0)


def _table() -> dict[str, Asset]:
    own = sorted(path for path in PAGES.iterdir() if path.suffix in MEDIA_TYPES)
    # One version for all of ours: scripts import each other by relative names.
    digest = hashlib.sha256(b"\0".join(path.read_bytes() for path in own)).hexdigest()[:12]
    table = {path.name: Asset(path, digest, MEDIA_TYPES[path.suffix]) for path in own}
    plotly = find_spec("plotly")
    if plotly is not None and plotly.origin is not None:
        script = Path(plotly.origin).parent / "package_data" / "plotly.min.js"
        table[script.name] = Asset(script, f"plotly-{version('plotly')}", MEDIA_TYPES[".js"])
    return table


ASSETS = _table()
_packing = threading.Lock()


def url_of(name: str) -> str:
    """Where a page finds the file."""
    return f"/static/{ASSETS[name].version}/{name}"


@router.get("/static/{version}/{name}")
def get_asset(
    request: Request,
    version: Annotated[str, PathParameter(max_length=40)],
    name: Annotated[str, PathParameter(max_length=80)],
) -> Response:
    """A file of the pages; for ever, if the version in the URL is its own."""
    asset = ASSETS.get(name)
    if asset is None:
        raise Problem(404, f"no file '{name[:80]}'; known: {', '.join(ASSETS)} (path: name)")
    current = version == asset.version
    etag = f'W/"{asset.version}-{name}"'
    fresh = unchanged(request, etag, current)
    if fresh is not None:
        return fresh
    headers = caching(etag, current) | {"Vary": "Accept-Encoding"}
    if "gzip" not in request.headers.get("accept-encoding", ""):
        return Response(asset.path.read_bytes(), headers=headers, media_type=asset.media_type)
    with _packing:  # four megabytes are packed once, not once a client
        content = asset.packed
    return Response(content, headers=headers | {"Content-Encoding": "gzip"}, media_type=asset.media_type)
