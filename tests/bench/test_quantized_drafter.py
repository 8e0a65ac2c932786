"""What doctor says about a drafter's weights in 8 bits."""

import torch

from outdraft.bench.quantized_drafter import advice, int8_speed
from tests.kernels.tables import cpu_kernels


def test_a_speed_is_measured_with_the_machines_own_products():
    assert int8_speed(cpu_kernels(), torch.bfloat16, 64, 2) > 0


def test_int8_is_recommended_only_where_it_is_faster_beyond_noise():
    assert advice(1.8) == "int8 is 1.80 times as fast as weights as they are: recommended"
    assert advice(1.05) == "int8 is 1.05 times as fast as weights as they are: not recommended"
    assert advice(0.7).endswith("not recommended")
