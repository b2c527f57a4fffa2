"""The recorder: copies by value, lets go whatever happens, joins chunks, refuses names nobody shows."""

import pytest
import torch

from probes.core.recorder import Recorder
from reference.config import InputError
from reference.points import Taps

POINTS = ("embed", "layers.0.attn.visible", "layers.2.attn.indexer.score", "layers.2.attn.selected")


class Model:
    """Shows what it is told to."""

    def __init__(self):
        self.taps = Taps(POINTS)

    def show(self, point, value):
        if self.taps.wants(point):
            self.taps.emit(point, value)


@pytest.fixture
def model():
    return Model()


def test_a_value_is_copied_at_the_tap(model):
    buffer = torch.ones(1, 2, 3)
    with Recorder(model, ["embed"]) as trace:
        trace.begin("prefill")
        model.show("embed", buffer)
        buffer.fill_(7)
    assert trace.get("embed", "prefill").eq(1).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.float32])
def test_real_numbers_become_packed_fp32_with_their_nans(model, dtype):
    value = torch.tensor([[[1.5, float("nan"), float("inf"), -float("inf")]]], dtype=dtype).expand(2, 3, 4)
    with Recorder(model, ["embed"]) as trace:
        model.show("embed", value)
    kept = trace.get("embed")
    assert kept.dtype == torch.float32
    assert kept.is_contiguous()
    assert torch.equal(kept.nan_to_num(5), value.float().nan_to_num(5))


def test_indices_become_int64(model):
    with Recorder(model, ["layers.2.attn.selected"]) as trace:
        model.show("layers.2.attn.selected", torch.tensor([[[3, -1]]], dtype=torch.int32))
    assert trace.get("layers.2.attn.selected").dtype == torch.int64


def test_it_lets_go(model):
    with Recorder(model, ["embed"]) as trace:
        assert model.taps.observers == 1
        assert model.taps.wants("embed")
        assert not model.taps.wants("layers.0.attn.visible")
    model.show("embed", torch.ones(1, 1, 1))
    assert model.taps.observers == 0
    assert trace.keys() == ()


def test_it_lets_go_after_an_exception(model):
    with pytest.raises(ZeroDivisionError), Recorder(model, ["embed"]):
        raise ZeroDivisionError
    assert model.taps.observers == 0


def test_a_failed_start_leaves_nothing_attached(model):
    with pytest.raises(InputError), Recorder(model, ["embed", "layers.2.attn.qq"]):
        pytest.fail("never runs")
    assert model.taps.observers == 0


def test_an_unknown_point_names_the_nearest(model):
    with pytest.raises(InputError, match=r"nearest is 'layers\.2\.attn\.selected'"), Recorder(model, ["layers.2.attn.selectd"]):
        pytest.fail("never runs")


def test_a_point_the_model_lacks_is_an_error(model):
    with pytest.raises(InputError, match="not in this model"), Recorder(model, ["layers.0.attn.selected"]):
        pytest.fail("never runs")


def test_a_string_is_not_a_list_of_points(model):
    with pytest.raises(InputError, match="expected a list"):
        Recorder(model, "embed")


def test_without_points_everything_is_recorded(model):
    with Recorder(model) as trace:
        for point in POINTS:
            model.show(point, torch.zeros(1, 1, 4))
    assert {point for _, _, point in trace.keys()} == set(POINTS)  # noqa: SIM118


def test_chunks_of_one_pass_are_joined_along_s(model):
    with Recorder(model, POINTS) as trace:
        trace.begin("prefill", positions=torch.arange(5)[None], valid=torch.ones(1, 5))
        for start, stop in ((0, 2), (2, 5)):
            n = stop - start
            model.show("embed", torch.arange(start, stop).float().reshape(1, n, 1))
            model.show("layers.2.attn.indexer.score", torch.full((1, n, stop), float(start)))
            model.show("layers.2.attn.selected", torch.zeros(1, n, stop, dtype=torch.int64))
    assert trace.get("embed", "prefill").flatten().tolist() == [0, 1, 2, 3, 4]
    score = trace.get("layers.2.attn.indexer.score", "prefill")
    assert score.shape == (1, 5, 5)
    assert score[0, 0].tolist() == [0, 0, float("-inf"), float("-inf"), float("-inf")]
    selected = trace.get("layers.2.attn.selected", "prefill")
    assert selected[0, 1].tolist() == [0, 0, -1, -1, -1]


def test_visible_grows_at_its_end_so_that_the_window_stays_in_front(model):
    window, early, late = 2, torch.tensor([[[0, -1, -1]]]), torch.tensor([[[0, 1, 0, 1]]])
    with Recorder(model, POINTS) as trace:
        model.show("layers.0.attn.visible", early)
        model.show("layers.0.attn.visible", late)
    visible = trace.get("layers.0.attn.visible")
    assert visible[0, :, :window].tolist() == [[0, -1], [0, 1]]
    assert visible[0, :, window:].tolist() == [[-1, -1], [0, 1]]


def test_values_of_different_width_are_no_chunks_of_one_pass(model):
    with Recorder(model, ["embed"]) as trace:
        model.show("embed", torch.zeros(1, 1, 3))
        model.show("embed", torch.zeros(1, 1, 4))
    with pytest.raises(RuntimeError, match="differ in shape"):
        trace.get("embed")


def test_fewer_queries_than_positions_is_noticed(model):
    with Recorder(model, ["embed"]) as trace:
        trace.begin("prefill", positions=torch.arange(4)[None])
        model.show("embed", torch.zeros(1, 3, 2))
    with pytest.raises(RuntimeError, match="positions"):
        trace.get("embed", "prefill")


def test_decode_steps_are_stacked(model):
    with Recorder(model, POINTS) as trace:
        for step in range(3):
            trace.begin("decode", step, positions=torch.tensor([[10 + step]]), valid=torch.tensor([[step != 1]]))
            model.show("embed", torch.full((1, 1, 2), float(step)))
            model.show("layers.2.attn.selected", torch.arange(step + 1).reshape(1, 1, step + 1))
    assert trace.steps() == (0, 1, 2)
    assert trace.stack("embed")[0, :, 0].tolist() == [0, 1, 2]
    assert trace.stack("layers.2.attn.selected", steps=[0, 2]).tolist() == [[[0, -1, -1], [0, 1, 2]]]
    assert trace.stacked_positions().tolist() == [[10, 11, 12]]
    valid = trace.stacked_valid([1, 2])
    assert valid is not None
    assert valid.tolist() == [[False, True]]


def test_what_did_not_fire_is_said(model):
    with Recorder(model, POINTS, phases=["decode"], steps=[1]) as trace:
        trace.begin("prefill")
        model.show("embed", torch.zeros(1, 1, 1))
        for step in range(2):
            trace.begin("decode", step)
            model.show("embed", torch.zeros(1, 1, 1))
    assert not trace.fired("embed", "prefill")
    assert not trace.fired("embed", "decode", 0)
    assert trace.fired("embed", "decode", 1)
    with pytest.raises(KeyError, match="not shown in prefill"):
        trace.get("embed", "prefill")
    with pytest.raises(KeyError):
        trace.stack("embed")


@pytest.mark.parametrize(("phase", "step"), [("prefil", None), ("decode", None), ("prefill", 0), ("decode", -1)])
def test_a_pass_needs_a_known_name(model, phase, step):
    with Recorder(model, POINTS) as trace, pytest.raises(InputError):
        trace.begin(phase, step)


def test_a_pass_is_recorded_once(model):
    with Recorder(model, POINTS) as trace:
        trace.begin("prefill")
        with pytest.raises(RuntimeError, match="already"):
            trace.begin("prefill")


def test_a_recorder_is_used_once(model):
    recorder = Recorder(model, POINTS)
    with recorder:
        pass
    with pytest.raises(RuntimeError, match="used once"), recorder:
        pytest.fail("never runs")
