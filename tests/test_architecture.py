"""The arrows between the packages, and files that stay readable."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("models", "study", "service")
MODULES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
RAY_FILES = ("run", "driver", "group", "remote", "searcher", "worker")
MAY_IMPORT_RAY = {f"study/{name}.py" for name in RAY_FILES}


def names(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imports(path: Path) -> set[str]:
    """Top-level names of all that a file imports, late imports included."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{names(path)}: relative import"
            found.add(str(node.module).partition(".")[0])
    return found


def loaded_by(*modules: str) -> set[str]:
    """What of the heavy libraries a fresh interpreter has loaded after importing `modules`."""
    program = f"import sys, {', '.join(modules)}\nprint(*({{'ray', 'torch', 'optuna'}} & set(sys.modules)))"
    found = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr
    return set(found.stdout.split())


def test_the_service_loads_neither_ray_nor_torch() -> None:
    assert loaded_by("service.app") == set()


def test_what_the_service_reads_with_loads_neither_ray_nor_torch() -> None:
    assert loaded_by("study.traces", "study.catalogue", "study.metrics", "study.storage") == set()


def test_models_and_training_load_no_ray() -> None:
    assert loaded_by("models", "models.transformer", "models.clipping", "study.train") == {"torch"}


@pytest.mark.parametrize("path", MODULES, ids=names)
def test_a_file_imports_along_the_arrows_only(path: Path) -> None:
    found, name = imports(path), names(path)
    package = name.partition("/")[0]
    if package == "models":
        assert found <= sys.stdlib_module_names | {"models", "torch"}
    if package == "study":
        assert "service" not in found
        assert "ray" not in found or name in MAY_IMPORT_RAY
    if package == "service":
        assert not found & {"ray", "torch", "models", "optuna"}


@pytest.mark.parametrize("path", MODULES, ids=names)
def test_a_file_says_what_it_is_and_stays_short(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert not text or ast.get_docstring(ast.parse(text)), "a module docstring says what and why"
    assert len(text.splitlines()) <= 300


def test_every_study_package_is_shipped() -> None:
    """A folder with code that pyproject forgets is missing from what pip installs."""
    import tomllib

    shipped = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    assert shipped == {names(path.parent).replace("/", ".") for path in MODULES}
