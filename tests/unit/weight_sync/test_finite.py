"""Values that are not finite are found in every type of weights."""

from __future__ import annotations

import pytest
import torch

from headway.contracts.errors import SyncError
from weight_sync.tensors import check_finite


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn]
)
def test_values_that_are_not_finite_are_counted(dtype: torch.dtype) -> None:
    good, bad = torch.ones(3, 2).to(dtype), torch.tensor([1.0, float("nan")]).to(dtype)
    check_finite([("a", good), ("b", good)], "version 3")
    with pytest.raises(SyncError, match="version 3: 1 of 2 values of b are NaN or infinite"):
        check_finite([("a", good), ("b", bad)], "version 3")


def test_a_sum_that_overflows_is_no_value() -> None:
    check_finite([("a", torch.full((9,), 60000.0, dtype=torch.float16))], "version 3")
    check_finite([], "version 3")
