"""How Optuna chooses the next point: by name, and seeded so that a search can be cut anywhere.

A sampler is made anew for every suggestion, its seed drawn from the search's seed and the number of
trials so far. So a resumed search doesn't repeat what it drew before, and suggests what the undisturbed
one would have suggested after the same history.
"""

import importlib.util
import warnings
from collections.abc import Callable

import numpy as np
from optuna import samplers
from optuna.exceptions import ExperimentalWarning

from study.config import ConfigError, SearchSection

warnings.filterwarnings("ignore", category=ExperimentalWarning)
# That a diverged point is worse than any number is meant so.
warnings.filterwarnings("ignore", message="Clip non-finite values")

STARTUP_TRIALS = 10  # points at random before a model of them is made (Optuna's default)


def make_sampler(search: SearchSection, num_trials: int) -> samplers.BaseSampler:
    """The sampler of the suggestion that follows `num_trials` others."""
    seed = int(np.random.SeedSequence([search.sampler_seed, num_trials]).generate_state(1)[0])
    return SAMPLERS[search.sampler or "tpe"](search, seed)


def check_sampler(search: SearchSection) -> None:
    """ConfigError if the sampler can't do what the study asks of it."""
    if search.sampler != "cmaes":
        return
    if importlib.util.find_spec("cmaes") is None:
        raise ConfigError(
            "sampler cmaes needs the package cmaes; run: pip install 'gradnorm-study[cmaes]' (search: sampler)"
        )
    if search.metrics is not None:
        raise ConfigError("sampler cmaes knows one metric; with two: gp, nsga2, qmc, tpe (search: sampler)")


def _tpe(_: SearchSection, seed: int) -> samplers.BaseSampler:
    return samplers.TPESampler(seed=seed, n_startup_trials=STARTUP_TRIALS)


def _gp(_: SearchSection, seed: int) -> samplers.BaseSampler:
    return samplers.GPSampler(seed=seed, n_startup_trials=STARTUP_TRIALS, warn_independent_sampling=False)


def _nsga2(_: SearchSection, seed: int) -> samplers.BaseSampler:
    return samplers.NSGAIISampler(seed=seed)


def _cmaes(_: SearchSection, seed: int) -> samplers.BaseSampler:
    return samplers.CmaEsSampler(seed=seed, warn_independent_sampling=False)


def _qmc(search: SearchSection, seed: int) -> samplers.BaseSampler:
    # One sequence, whose seed must stay; how far it has gone lies in the Optuna study.
    return samplers.QMCSampler(
        scramble=True,
        seed=search.sampler_seed,
        independent_sampler=samplers.RandomSampler(seed),
        warn_independent_sampling=False,
    )


SAMPLERS: dict[str, Callable[[SearchSection, int], samplers.BaseSampler]] = {
    "tpe": _tpe,
    "gp": _gp,
    "nsga2": _nsga2,
    "cmaes": _cmaes,
    "qmc": _qmc,
}
