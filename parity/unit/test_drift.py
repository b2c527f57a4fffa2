"""Errors over steps: growth, slope, and position modulo the compression ratios."""

from __future__ import annotations

import math

import pytest
import torch

from probes.core.drift import drift_measurement, slope


def test_a_constant_error_does_not_grow():
    m = drift_measurement(torch.full((1, 30), 1e-3), torch.arange(30)[None])
    assert (m["growth"], m["steps"]) == (1, 30)
    assert m["slope"] == pytest.approx(0, abs=1e-9)


def test_a_growing_error_has_its_slope():
    errors = 1e-4 * 10 ** (torch.arange(100.0) / 50)  # two decades per 100 steps
    m = drift_measurement(errors[None], torch.arange(100)[None])
    assert m["slope"] == pytest.approx(2, rel=1e-4)
    assert m["growth"] > 10
    assert m["worst_step"] == 99


def test_an_error_at_every_fourth_position_shows():
    position = torch.arange(250, 380)[None]
    errors = torch.where(position % 4 == 3, 1e-2, 1e-4)
    assert drift_measurement(errors, position)["mod4"] == pytest.approx([1e-4, 1e-4, 1e-4, 1e-2], rel=1e-5)


def test_an_error_at_one_group_boundary_shows():
    position = torch.arange(250, 380)[None]
    errors = torch.where(position % 128 == 0, 1e-2, 1e-4)
    m = drift_measurement(errors, position)
    assert m["mod128_worst"] == 0
    assert m["mod128_ratio"] == pytest.approx(100, rel=1e-4)


def test_steps_without_a_row_do_not_count():
    errors = torch.tensor([[math.nan, 2e-3, math.nan, 4e-3]])
    m = drift_measurement(errors, torch.arange(4)[None])
    assert (m["steps"], m["worst_step"]) == (2, 3)
    assert drift_measurement(errors * math.nan, torch.arange(4)[None]) == {"steps": 0}


def test_an_infinite_error_stays():
    assert drift_measurement(torch.tensor([[0.0, math.inf, 0.0]]), torch.arange(3)[None])["worst"] == math.inf


def test_slope_of_a_line():
    assert slope(torch.tensor([1.0, 3.0, 5.0])) == pytest.approx(2)
    assert slope(torch.tensor([1.0])) == 0
