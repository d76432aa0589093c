"""What an engineer brings along: a callable by its import path, with the options that it takes.

    trial.model: {import: my_package.my_module:build, width: 64}

`module:name` is looked up as Python would from the command's current folder, with PYTHONPATH. A
callable is called with what its CONTRACTS say and with the options beside `import`; which it knows, its
signature says. Every mistake is one VariantError in the form given; known (where).
"""

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from models.variants import VariantError, one_line, unknown

OUR_PACKAGES = ("models", "study", "service")


@dataclass(frozen=True)
class Contract:
    """How a callable is called: by place and by name; the options beyond; what it gives."""

    by_place: tuple[str, ...] = ()
    by_name: tuple[str, ...] = ()
    if_taken: tuple[str, ...] = ()  # handed over by name where its signature has it
    needed: tuple[str, ...] = ()  # options that must have a value
    gives: type | None = None


CONTRACTS = {
    "model": Contract(by_name=("vocab_size", "context_length"), if_taken=("causal",), gives=nn.Module),
    "loss": Contract(by_place=("logits", "targets")),
    "optimizer": Contract(by_place=("named_parameters",), needed=("lr",), gives=torch.optim.Optimizer),
    "data": Contract(),
}


def is_import(spec: Any) -> bool:
    """Whether a field of a study file names an import path instead of a variant."""
    return isinstance(spec, Mapping) and "import" in spec


def search_paths() -> list[str]:
    """Where this command looks beyond what is installed; workers are told."""
    return [os.getcwd(), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]


def look_in(paths: Iterable[str]) -> None:
    """Look in these folders too, after all others, so that none shadows what is installed."""
    sys.path += [path for path in map(os.path.abspath, paths) if path not in sys.path]


def find(kind: str, path: Any, where: str = "") -> Callable[..., Any]:
    """The callable at `module:name`."""
    place = f" ({where})" if where else ""
    module_name, _, names = path.partition(":") if isinstance(path, str) else ("", "", "")
    if not module_name or not names:
        raise VariantError(f"import {path!r} of {kind}; must be module:name, such as my_module:build{place}")
    look_in(search_paths())
    importlib.invalidate_caches()
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:  # a module may raise anything
        lacking = error.name if isinstance(error, ModuleNotFoundError) else None
        if lacking and f"{module_name}.".startswith(f"{lacking}."):
            raise VariantError(
                f"no module '{module_name}' for {kind}; {_looked_in(module_name)}{place}"
            ) from None
        raise VariantError(f"{kind} '{path}' can't be imported: {one_line(error)}{place}") from error
    for name in names.split("."):
        if not hasattr(found, name):
            known = [
                key for key, value in vars(found).items() if getattr(value, "__module__", None) == module_name
            ]
            raise unknown(f"name in '{module_name}' for {kind}", name, known, where)
        found = getattr(found, name)
    if not callable(found):
        raise VariantError(f"{kind} '{path}' is {type(found).__name__}; must be callable{place}")
    return found


def _looked_in(module_name: str) -> str:
    own = module_name.partition(".")[0]
    if own in OUR_PACKAGES:
        return f"'{own}' is a package of gradnorm-study's own: give yours another name"
    return f"looked in {os.getcwd()}, PYTHONPATH and what is installed"


def complete(kind: str, spec: Mapping[str, Any]) -> dict[str, Any]:
    """`spec` with the defaults of its callable's signature filled in; VariantError if it can't be called."""
    contract, path = CONTRACTS[kind], spec["import"]
    known, is_open = _options(kind, find(kind, path), path)
    given = {option: value for option, value in spec.items() if option != "import"}
    for option in given:
        handed_over = option in (*contract.by_place, *contract.by_name)
        if handed_over or (option not in known and not is_open):
            raise unknown(f"option of {kind} '{path}'", str(option), known)
    resolved = {"import": path}
    for option, parameter in known.items():
        if option in given:
            resolved[option] = given[option]
        elif parameter.default is parameter.empty:
            raise VariantError(f"{kind} '{path}' needs its option '{option}'")
        elif parameter.default is None or isinstance(parameter.default, bool | int | float | str):
            resolved[option] = parameter.default
    for option in contract.needed:
        if option not in resolved | given:
            raise VariantError(f"{kind} '{path}' needs its option '{option}'")
    return resolved | given


def _options(kind: str, function: Callable[..., Any], path: str) -> tuple[dict[str, inspect.Parameter], bool]:
    """The options that a callable names, and whether it takes any other; what we hand over is none."""
    contract = CONTRACTS[kind]
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except ValueError:  # some built-in ones have none
        return {}, True
    is_open = any(p.kind is p.VAR_KEYWORD for p in parameters)
    places = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    taken = places[: len(contract.by_place)]
    names = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    takes_all = any(p.kind is p.VAR_POSITIONAL for p in parameters) or len(taken) == len(contract.by_place)
    if not takes_all or not (is_open or names.issuperset(contract.by_name)):
        wanted = ", ".join((*contract.by_place, *(f"{name}=" for name in contract.by_name)))
        has = ", ".join(p.name for p in parameters) or "nothing"
        raise VariantError(f"{kind} '{path}' takes {has}; must take {wanted}")
    ours = {p.name for p in taken} | {*contract.by_name, *contract.if_taken}
    return {
        p.name: p
        for p in parameters
        if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name not in ours
    }, is_open


def names_parameter(kind: str, path: str, name: str) -> bool:
    """Whether the callable's signature has this name; `**options` doesn't count."""
    try:
        return name in inspect.signature(find(kind, path)).parameters
    except ValueError:
        return False


def bound(kind: str, spec: Mapping[str, Any], where: str = "") -> Callable[..., Any]:
    """The callable with its options, to be called many times."""
    options = {option: value for option, value in spec.items() if option != "import"}
    return partial(find(kind, spec["import"], where), **options)


def call(kind: str, spec: Mapping[str, Any], *context: Any, where: str = "", **handed: Any) -> Any:
    """What the callable gives for `context`, what is handed over by name, and its options.

    Whatever it raises becomes a VariantError that says so.
    """
    contract, path = CONTRACTS[kind], spec["import"]
    place = f" ({where})" if where else ""
    function = bound(kind, spec, where)
    handed = {
        name: value
        for name, value in handed.items()
        if name not in contract.if_taken or names_parameter(kind, path, name)
    }
    try:
        made = function(*context, **handed)
    except Exception as error:  # theirs may raise anything
        raise VariantError(f"{kind} '{path}' can't be made: {one_line(error)}{place}") from error
    if contract.gives is not None and not isinstance(made, contract.gives):
        raise VariantError(
            f"{kind} '{path}' gave {type(made).__name__}; must be torch's {contract.gives.__name__}{place}"
        )
    if isinstance(made, torch.optim.Optimizer) and (problem := _problem(made)):
        raise VariantError(f"{kind} '{path}' {problem}{place}")
    return made


def _problem(optimizer: torch.optim.Optimizer) -> str | None:
    """Why a training loop that calls step() and sets lr can't use an optimizer."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        return "needs a closure at every step; known: optimizers whose step() takes none"
    if any("lr" not in group for group in optimizer.param_groups):
        return "has a parameter group without lr, which the schedule sets"
    return None
