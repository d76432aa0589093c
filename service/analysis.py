"""The numbers of the study package that pictures and reports need; the only door to them from here.

Imported when first asked for: a list of runs needs none of it.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

Row = dict[str, Any]


def spikes_of(values: np.ndarray, long_enough: bool) -> tuple[np.ndarray, int]:
    """Indices of the spikes among `values` (n,) and how many values were judged.

    By OLMo 2's spike score (1,000 steps, 7 deviations), or where no trace is long enough for it by
    OLMo-core's monitor (128 steps, 6 deviations, upwards only).
    """
    from study.spikes import OLMO_CORE, SPIKE_SCORE, find_spikes

    return find_spikes(values, SPIKE_SCORE if long_enough else OLMO_CORE)


def lr_sensitivity(lrs: Sequence[float], losses: Sequence[float], initial_loss: float) -> float | None:
    """Mean excess loss over a sweep of learning rates (Wortsman et al. 2023, section 2.2)."""
    from study.metrics import lr_sensitivity as sensitivity

    return sensitivity(np.asarray(lrs), np.asarray(losses), initial_loss)


def reading(run: Row, trials: Sequence[Row]) -> dict[str, Any]:
    """What a run's numbers say, in sentences and tables."""
    from study.reading import arms_of, read

    return read(run, arms_of(trials))


def markdown(report: dict[str, Any]) -> str:
    """A reading as a Markdown document."""
    from study.reading import to_markdown

    return to_markdown(report)


def explained(values: Sequence[float], groups: Sequence[Any]) -> float | None:
    """Eta squared: the share of the variance of `values` that lies between `groups`, 0 to 1.

    None where there is nothing to explain: fewer than two groups, no variance, or no group that
    repeats (every value would explain itself). Numbers with more than ten distinct values are cut
    into five groups of equal size first.
    """
    numbers = np.asarray(values, np.float64)
    words = list(groups)
    if len(set(map(str, words))) > 10 and all(isinstance(word, int | float) for word in words):
        ranks = np.argsort(np.argsort(np.asarray(words, np.float64), kind="stable"))
        words = (ranks * 5 // len(words)).tolist()
    kinds = sorted(set(map(str, words)))
    total = float(((numbers - numbers.mean()) ** 2).sum()) if len(numbers) else 0.0
    if len(kinds) < 2 or len(kinds) == len(numbers) or total <= 0:
        return None
    labels = np.asarray(list(map(str, words)))
    members = [numbers[labels == kind] for kind in kinds]
    between = sum(len(member) * (member.mean() - numbers.mean()) ** 2 for member in members)
    return float(min(between / total, 1.0))
