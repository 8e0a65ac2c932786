"""What doctor says about weights in fewer bits."""

import torch

from outdraft.cli.doctor import FORMATS, advice, quantized_speeds
from outdraft.core.weights import WeightFormat
from tests.kernels.tables import cpu_kernels


def test_speeds_are_measured_with_the_machines_own_products():
    speeds = quantized_speeds(cpu_kernels(), torch.bfloat16, 64, 2)
    assert tuple(speeds) == FORMATS
    assert min(speeds.values()) > 0


def test_the_fastest_format_is_recommended_only_where_it_is_faster_beyond_noise():
    int8, int4 = FORMATS
    assert (int8, int4) == (WeightFormat.INT8, WeightFormat.INT4)
    as_they_are = "times as fast as weights as they are"
    assert advice({int8: 1.8, int4: 3.25}) == (
        f"int8 1.80, int4 3.25 {as_they_are}: int4 is recommended"
    )
    assert advice({int8: 1.8, int4: 1.5}).endswith("int8 is recommended")
    assert advice({int8: 1.05, int4: 0.7}).endswith("none is recommended")
