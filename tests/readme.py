"""The generated parts of the README: `python tests/readme.py` writes them, test_docs.py compares."""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from models.attention import RELAXATIONS
from models.blocks import BLOCKS
from models.clipping import CLIPS
from models.guards import GUARDS
from models.norms import NORMS
from models.optimizers import OPTIMIZERS
from models.resets import RESETS
from models.variants import options_of
from study.data import CORPORA
from study.loggers import LOGGERS
from study.schedules import SCHEDULES

TABLES = {
    "`trial.model.norm`: what normalizes": NORMS,
    "`trial.model.block`: where it sits, residual scale, init": BLOCKS,
    "`trial.model.relaxation`: attention scores kept sane": RELAXATIONS,
    "`trial.clip`: gradients before the step": CLIPS,
    "`trial.guard`: steps that are skipped": GUARDS,
    "`trial.optimizer`: the step": OPTIMIZERS,
    "`trial.reset`: moments between steps": RESETS,
    "`trial.schedule`: the learning rate": SCHEDULES,
    "`trial.data`: what is trained on": CORPORA,
    "`loggers`: where rows go beside the trace": LOGGERS,
}


def variants() -> str:
    """A table of every variant: its name, the first line of its docstring, its options with defaults."""
    lines = ["| name | what | options |", "|---|---|---|"]
    for title, table in TABLES.items():
        lines.append(f"| **{title}** | | |")
        for name, variant in table.items():
            summary = (variant.__doc__ or "").strip().splitlines()[0].replace("|", "\\|")
            options = ", ".join(
                f"{option}" if p.default is p.empty else f"{option} = {_plain(p.default)}"
                for option, p in options_of(variant).items()
            )
            lines.append(f"| `{name}` | {summary} | {options} |")
    return "\n".join(lines)


def _plain(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def endpoints() -> str:
    """Every route of the service's OpenAPI document, and the pages."""
    from service.app import create_app
    from service.settings import Settings

    app = create_app(Settings(storage="/nowhere", db="sqlite://"))
    lines = ["| route | what |", "|---|---|"]
    for path, methods in app.openapi()["paths"].items():
        what = methods["get"].get("description") or methods["get"].get("summary", "")
        lines.append(f"| `GET {path}` | {what.strip().splitlines()[0]} |")
    return "\n".join(lines)


def filled(text: str) -> str:
    """The README with its generated parts anew."""
    for name, content in (("variants", variants()), ("endpoints", endpoints())):
        block = f"<!-- {name} -->\n{content}\n<!-- /{name} -->"
        text = re.sub(rf"<!-- {name} -->.*?<!-- /{name} -->", lambda _, block=block: block, text, flags=re.S)
    return text


if __name__ == "__main__":
    readme = ROOT / "README.md"
    readme.write_text(filled(readme.read_text()))
