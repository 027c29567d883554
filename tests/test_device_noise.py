"""What the noise of devices costs, on made-up ratings."""

import pytest
from studies.device_noise import measure

from fedrecon._src.data.synthetic import synthetic_ratings

pytestmark = pytest.mark.slow


def test_copies_of_devices_hide_the_noise_that_few_devices_show():
    options = ["--preset", "paper", "--model.dim", "2", "--model.init-mean", "3.5", "--rounds", "1"]
    ratings = synthetic_ratings(num_users=80, num_items=30, mean_ratings=12)
    before, exact, few, many = measure(ratings, [4.0], [1, 10_000], rounds=2, clip_norm=0.5, options=options)
    assert (before.devices, exact.devices, few.devices, many.devices) == (0, 40, 40, 400_000)
    assert before.noise_multiplier is exact.noise_multiplier is None
    assert 1 < few.noise_multiplier < many.noise_multiplier  # delta is smaller for more devices
    assert exact.rmse != before.rmse
    assert abs(many.rmse - exact.rmse) < 1e-3
    assert abs(few.rmse - exact.rmse) > 10 * abs(many.rmse - exact.rmse)
