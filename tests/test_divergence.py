"""When a trial counts as diverged depends on its rows alone."""

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from study.divergence import FINAL_STEPS, LOSS_SCALE_FLOOR, Divergence, DivergenceWatch

VALUES = st.sampled_from([1.0, 2.0, 5.0, math.nan, math.inf, -math.inf])
SCALES = st.sampled_from([1.0, 65536.0, LOSS_SCALE_FLOOR, LOSS_SCALE_FLOOR / 2])


def rows(losses: list[float], norms: list[float] | None = None, scales: list[float] | None = None) -> Any:
    steps = np.arange(1, len(losses) + 1)
    return {
        "step": steps,
        "loss": np.array(losses, np.float32),
        "grad_norm": np.array(norms if norms is not None else np.ones(len(losses)), np.float32),
        "loss_scale": np.array(scales if scales is not None else np.ones(len(losses)), np.float32),
    }


def judged(
    watch: DivergenceWatch, columns: Any, cuts: list[int]
) -> tuple[Divergence | None, DivergenceWatch]:
    """What a watch says of rows that flushes cut at `cuts`, and the watch; it goes through a file at each."""
    edges = [0, *sorted({cut for cut in cuts if 0 < cut < len(columns["step"])}), len(columns["step"])]
    for begin, end in zip(edges[:-1], edges[1:], strict=True):
        again = DivergenceWatch(watch.patience, watch.scaled)
        again.load_state_dict(json.loads(json.dumps(watch.state_dict())))
        watch = again
        found = watch.scan({name: values[begin:end] for name, values in columns.items()})
        if found is not None:
            return found, watch
    return None, watch


@given(
    data=st.lists(st.tuples(VALUES, VALUES, SCALES), min_size=1, max_size=60),
    cuts=st.lists(st.integers(1, 60)),
    patience=st.integers(1, 5),
    scaled=st.booleans(),
)
def test_the_answer_does_not_depend_on_where_flushes_cut_the_rows(
    data: list[tuple[float, float, float]], cuts: list[int], patience: int, scaled: bool
) -> None:
    columns = rows(*map(list, zip(*data, strict=True)))
    whole, watch = judged(DivergenceWatch(patience, scaled), columns, [])
    cut, other = judged(DivergenceWatch(patience, scaled), columns, cuts)
    assert whole == cut
    if whole is None:
        assert repr(watch.state_dict()) == repr(other.state_dict())
        assert watch.at_the_end(len(data)) == other.at_the_end(len(data))
    assert whole == expected(columns, patience, scaled)


def expected(columns: Any, patience: int, scaled: bool) -> Divergence | None:
    """The rule read step by step."""
    streaks = {"nonfinite_loss": 0, "nonfinite_grad": 0}
    for step, loss, norm, scale in zip(*(columns[name] for name in columns), strict=True):
        for reason, value in (("nonfinite_loss", loss), ("nonfinite_grad", norm)):
            streaks[reason] = 0 if math.isfinite(value) else streaks[reason] + 1
        if streaks["nonfinite_loss"] == patience:
            return Divergence("nonfinite_loss", int(step) - patience + 1, int(step))
        if scaled and scale < LOSS_SCALE_FLOOR:
            return Divergence("loss_scale_floor", int(step), int(step))
        if not scaled and streaks["nonfinite_grad"] == patience:
            return Divergence("nonfinite_grad", int(step) - patience + 1, int(step))
    return None


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_loss_that_stays_nonfinite_ends_a_trial_where_its_patience_ends(bad: float) -> None:
    losses = [3.0] * 5 + [bad] * 2 + [3.0] + [bad] * 4
    watch = DivergenceWatch(patience=3, scaled=False)
    assert watch.scan(rows(losses)) == Divergence("nonfinite_loss", began=9, ends=11)
    assert DivergenceWatch(patience=5, scaled=False).scan(rows(losses)) is None


def test_under_a_loss_scale_an_overflow_is_no_news_and_the_floor_is() -> None:
    norms, losses = [math.inf] * 30, [3.0] * 30
    assert DivergenceWatch(10, scaled=False).scan(rows(losses, norms)) == Divergence("nonfinite_grad", 1, 10)
    scales = [2.0**16 / 2**halvings for halvings in range(30)]
    assert DivergenceWatch(10, scaled=True).scan(rows(losses, norms, scales)) is None
    scales = [
        2.0**-10 / 2**halvings for halvings in range(30)
    ]  # fairseq's floor lies between 2^-13 and 2^-14
    found = DivergenceWatch(10, scaled=True).scan(rows(losses, norms, scales))
    assert found == Divergence("loss_scale_floor", began=5, ends=5)


def test_a_last_loss_that_is_no_better_than_the_first_is_a_divergence() -> None:
    def end(losses: list[float]) -> Divergence | None:
        watch = DivergenceWatch(10, scaled=False)
        assert watch.scan(rows(losses)) is None
        return watch.at_the_end(len(losses))

    falls, stays = np.linspace(5, 3, 400).tolist(), [5.0] * 400
    assert end(falls) is None
    assert end(stays) == end([4.0] + stays[1:]) == Divergence("loss_above_init", 400, 400)
    assert (
        end(falls[:-40] + [9.0] * 40) is not None and end(falls[:-40] + [9.0] * 20 + [3.0] * 20) is not None
    )
    assert end(falls[:-40] + [5.2] * 10 + [3.0] * 30) is None  # a tenth of the steps is judged, not one
    assert end(stays[:99]) is None  # a short trial is not judged by it
    assert end(stays[:100]) is not None
    assert end(stays[:-1] + [math.nan]) is not None and end(falls[:-1] + [math.nan]) is None


def test_a_long_trial_is_judged_by_its_last_hundred_steps() -> None:
    watch = DivergenceWatch(10, scaled=False)
    losses = [5.0] + [1.0] * 4900 + [9.0] * FINAL_STEPS
    assert watch.scan(rows(losses)) is None
    assert watch.at_the_end(5001) is not None
    # The mean over exactly the last hundred is a hair above the first loss, over 99 of them below it.
    watch = DivergenceWatch(10, scaled=False)
    assert watch.scan(rows([5.0] + [1.0] * 4900 + [15.0] + [4.9] * (FINAL_STEPS - 1))) is None
    assert watch.at_the_end(5001) is not None
    watch = DivergenceWatch(10, scaled=False)
    assert watch.scan(rows([5.0] + [1.0] * 4899 + [15.0] + [4.9] * FINAL_STEPS)) is None
    assert watch.at_the_end(5000) is None
