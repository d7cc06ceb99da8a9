"""The scale that code in a closure, or in a loop over attempts, reads: that of its own losses."""

import copy
import pickle

import numpy as np
import pytest

from gradscaler import FixedScale
from tests.support.eager import library

SCALE = 1024.0
GRADIENT = np.float32([1.5, -2.0])


class Read:
    """A body that reads the scale in every way, before and after it scales a loss.

    Attributes:
        used: the scale of each loss.
        read: the scales that were read in each run of the body.
    """

    def __init__(self, overflows, **options):
        options = options or {"init_scale": SCALE}
        self.scaler, self.overflows = library.scaler(**options), overflows
        (self.weight,) = library.make_parameters(np.zeros(2, np.float32))
        self.optimizer = library.sgd([self.weight], lr=1.0)
        self.used, self.read = [], []
        self.beside = lambda: None

    def ways(self):
        scaler = self.scaler
        scales = {scaler.get_scale(), scaler._scale.item()}
        if hasattr(scaler, "_get_scale_async"):
            scales |= {scaler._get_scale_async().item()}
            scales |= {scaler._check_scale_growth_tracker("unscale_")[0].item()}
        return scales

    def body(self):
        library.clear_gradients(self.optimizer)
        read = self.ways() if self.used else set()
        ones = library.tensor([1.0])
        self.used.append(self.scaler.scale(ones).item())
        ill = len(self.used) <= self.overflows
        gradient = np.full(2, np.inf, np.float32) if ill else GRADIENT
        library.backward(self.scaler, [self.weight], [gradient])
        self.read.append(read | self.ways())
        self.beside()
        return ones

    def run(self, kind):
        if kind == "closure":
            self.scaler.step(self.optimizer, self.body)
            return
        for _ in self.scaler.attempts(self.optimizer):
            self.body()
        self.scaler.step(self.optimizer)


kinds = pytest.mark.parametrize("kind", ["closure", "attempts"])


@kinds
@pytest.mark.parametrize("overflows", [0, 1, 3])
def test_it_is_the_scale_that_scale_uses_there(kind, overflows, place):
    each = Read(overflows)
    each.run(kind)
    assert each.used == [SCALE / 2**i for i in range(overflows + 1)]
    assert each.read == [{scale} for scale in each.used]
    np.testing.assert_array_equal(library.numpy(each.weight), -GRADIENT)


@kinds
def test_after_the_body_it_is_the_scaler_s_until_update(kind, place):
    each = Read(2)
    each.run(kind)
    assert each.ways() == {SCALE}
    each.scaler.update()
    assert each.ways() == {SCALE / 4}


@kinds
def test_when_retries_are_used_up_it_is_the_scaler_s_again(kind):
    each = Read(100)
    each.run(kind)
    assert each.read[-1] == {SCALE / 2**16}
    assert each.ways() == {SCALE}


def test_after_a_loop_that_is_left_it_is_the_scaler_s_again():
    each = Read(1)
    for attempt in each.scaler.attempts(each.optimizer):
        each.body()
        if attempt == 1:
            break
    assert each.read == [{SCALE}, {SCALE / 2}]
    assert each.ways() == {SCALE}


@kinds
def test_a_body_that_raises_leaves_the_scaler_s(kind):
    each = Read(1)

    def refuse():
        if len(each.used) == 2:
            raise ZeroDivisionError

    each.beside = refuse
    with pytest.raises(ZeroDivisionError):
        each.run(kind)
    assert each.ways() == {SCALE}


@kinds
def test_a_fixed_scale_stays_what_it_is(kind):
    each = Read(100, policy=FixedScale(SCALE))
    each.run(kind)
    assert each.read == [{SCALE}]


@kinds
def test_a_checkpoint_that_is_taken_in_a_body_is_the_scaler_s(kind):
    """As is the state that a monitor reads: only update() moves it."""
    each = Read(2)
    before = library.exact(each.scaler.state_dict())
    seen = []

    def save():
        state = each.scaler.observed.state
        seen.append((library.exact(each.scaler.state_dict()), float(state.scale)))

    each.beside = save
    each.run(kind)
    assert seen == [(before, SCALE)] * 3


def test_a_scaler_that_is_copied_in_a_body_goes_on_from_the_scaler_s_scale():
    each = Read(1)
    copies = []

    def save():
        copies.append(copy.deepcopy(each.scaler))
        copies.append(pickle.loads(pickle.dumps(each.scaler)))

    each.beside = save
    each.run("closure")
    assert [made.get_scale() for made in copies] == [SCALE] * 4
    assert [made.scale(library.tensor([1.0])).item() for made in copies] == [SCALE] * 4


@kinds
def test_a_scale_that_is_set_in_a_body_is_the_scale_in_use(kind):
    each = Read(1)

    def cap():
        if len(each.used) == 2:
            each.scaler._scale = library.tensor([8.0] if library.name == "paddle" else 8.0)
            assert each.ways() == {8.0}
            assert each.scaler.scale(library.tensor([1.0])).item() == 8.0

    each.beside = cap
    each.run(kind)
    assert len(each.used) == 2


def test_a_disabled_scaler_s_is_what_it_is_elsewhere():
    each = Read(0, enabled=False)
    elsewhere = each.scaler.get_scale()
    read = []
    each.scaler.step(each.optimizer, lambda: read.append(each.scaler.get_scale()))
    read += [each.scaler.get_scale() for _ in each.scaler.attempts(each.optimizer)]
    assert read == [elsewhere] * 2
