"""Type checking of a user's own policy."""

CODE = """
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from gradscaler import AmaxScale, DynamicScale, FixedScale, Policy, ScaleState
from gradscaler.diagnose.simulate import Trace, replay


class CoinState(NamedTuple):
    scale: Any
    finite_steps: Any
    nonfinite_steps: Any
    luck: Any


@dataclass(frozen=True)
class Coin:
    def init(self) -> CoinState:
        return CoinState(np.float32(8), 0, 0, np.float32(1))

    def update(self, state: CoinState, found_inf: Any, where: Any = None) -> CoinState:
        return state._replace(luck=state.luck * 2)


class Uncounted(NamedTuple):
    scale: Any


class WithoutCounts:
    def init(self) -> Uncounted:
        return Uncounted(np.float32(8))

    def update(self, state: Uncounted, found_inf: Any, where: Any = None) -> Uncounted:
        return state


own: Policy[CoinState] = Coin()
print(own.update(own.init(), True).luck)
print(own.init().fortune)  # attr-defined
policies: list[Policy] = [Coin(), DynamicScale(), FixedScale(1.0), AmaxScale()]
print(policies[0].init()._replace(scale=8.0).scale, policies[0].init()[3:])
print(policies[0].init().luck)  # attr-defined
replay(Coin(), Trace([1.0]))
other: Policy[ScaleState] = Coin()  # assignment
uncounted: Policy = WithoutCounts()  # assignment
uninitialised: Policy = 1024.0  # assignment
"""


def test_a_policy_with_a_state_of_its_own_is_a_policy_and_one_without_counts_is_not(check_types):
    check_types(CODE)
