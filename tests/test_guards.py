"""Guards say which steps not to take, on the device and exactly."""

import math

import pytest
import torch

from models.guards import GUARDS


@pytest.mark.parametrize("loss", [1.0, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("norm", [0.5, math.nan, math.inf])
def test_nonfinite_steps_are_skipped_by_the_guard_and_taken_without_it(loss: float, norm: float) -> None:
    given = torch.tensor(loss), torch.tensor(norm)
    skip = GUARDS["skip_nonfinite"]()(*given)
    assert skip.shape == () and skip.dtype == torch.bool
    assert skip.item() == (not (math.isfinite(loss) and math.isfinite(norm)))
    assert not GUARDS["none"]()(*given)
