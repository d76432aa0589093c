"""Draw a run's pictures into its folder: what the service would serve, as files.

python -m service.draw latest
python -m service.draw 20260101-figure --plot gradnorm --kind svg --out pictures
"""

import argparse
import sys
from pathlib import Path

from pydantic import ValidationError

from service.options import Kind, PictureOptions
from service.pictures import draw
from service.plots import PLOTS
from service.problems import Problem
from service.settings import Settings
from service.store import Store
from study.catalogue import CatalogueError


def main(arguments: list[str] | None = None) -> int:
    """The command; 0, or 2 with one line on stderr for a user's mistake."""
    parser = argparse.ArgumentParser(prog="python -m service.draw", description=__doc__.split("\n")[0])
    parser.add_argument(
        "runs", nargs="*", default=["latest"], metavar="ID", help="run ids, trial ids, latest"
    )
    parser.add_argument("--plot", action="append", choices=list(PLOTS), help="default: gradnorm and loss")
    parser.add_argument("--kind", default="png", choices=[kind.value for kind in Kind])
    parser.add_argument("--out", type=Path, help="folder; default: the run's own, in the storage")
    parser.add_argument("--storage", help="default: GRADNORM_STORAGE or runs")
    parser.add_argument("--db", help="default: GRADNORM_DB or SQLite in the storage")
    given = parser.parse_args(arguments)
    overrides = {name: getattr(given, name) for name in ("storage", "db") if getattr(given, name)}
    try:
        store = Store(Settings(**overrides))
        for identifier in given.runs:
            for path in pictures(
                store, identifier, given.plot or ["gradnorm", "loss"], Kind(given.kind), given.out
            ):
                print(path)  # noqa: T201 - the command's output
    except Problem as problem:
        return refused(problem.detail)
    except (CatalogueError, ValidationError, ValueError, OSError) as error:
        return refused(str(error))
    return 0


def pictures(store: Store, identifier: str, plots: list[str], kind: Kind, out: Path | None) -> list[Path]:
    """Draw the plots of one run or trial; the paths of the files."""
    selection = store.find(identifier)
    storage = store.storage_of(selection.run)
    if out is None and not storage.is_local:
        raise ValueError(f"storage '{storage.uri}' is remote; known: a local folder (--out)")
    folder = out or Path(storage.path(selection.run["id"]))
    folder.mkdir(parents=True, exist_ok=True)
    prefix = (
        f"{selection.trials[0]['id']}-" if selection.narrow else (f"{selection.run['id']}-" if out else "")
    )
    paths = []
    for plot in plots:
        path = folder / f"{prefix}{plot}.{kind.value}"
        path.write_bytes(draw(store, [selection], plot, PictureOptions(), kind))
        paths.append(path)
    return paths


def refused(reason: str) -> int:
    print(" ".join(reason.split()), file=sys.stderr)  # noqa: T201 - the one line of a refusal
    return 2


if __name__ == "__main__":
    sys.exit(main())
