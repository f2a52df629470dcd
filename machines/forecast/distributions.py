"""What the durations of a draw are drawn from, and what all of them have in common.

How it works.  The durations of steps come from earlier ones.  If each step of a draw were drawn alone, the
sum of many would hardly vary, and a forecast would promise its end to the second.  Two things do not average
out: few samples say little about the mean, and what follows is as a whole slower or faster than what was,
because its steps share a machine, a network and an hour.  So each draw first draws one factor for all steps,
and one for the mean of each step.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from machines.forecast.model import Deviation

PRIOR_SAMPLES = 1
"""How many samples the assumed deviation counts as: a few that agree may do so by chance."""

PRIOR_DEVIATION = 0.1
"""Deviation of a step's durations before any is seen, as a share of their mean."""

MANY = 30
"""From so many degrees of freedom on the t-distribution is the normal one."""

LEAST_NUMBER = 1e-12
"""In the place of 0, which has no quantile."""

_NORMAL = statistics.NormalDist()


@dataclass(frozen=True, slots=True)
class Distribution:
    """The durations of a step, all equally likely; `mean` is the number of their mean."""

    values: Sequence[float]
    mean: int


@dataclass(slots=True)
class Distributions:
    """What the durations of all steps are drawn from; the first two fields are as in Assumptions."""

    common_deviation: Deviation
    are_samples: bool
    _all: list[Distribution] = field(default_factory=list)
    _errors: list[Deviation] = field(default_factory=list)
    _numbers: dict[tuple[int, float], int] = field(default_factory=dict)
    _mean_of: dict[int, int] = field(default_factory=dict)
    """By the id() of the durations as an object; the distributions keep these."""

    def number_of(self, durations: Sequence[float], stretch: float) -> int:
        """Return the number of the distribution of these durations, each multiplied by `stretch`."""
        key = (id(durations), stretch)
        if key not in self._numbers:
            if id(durations) not in self._mean_of:
                self._mean_of[id(durations)] = len(self._errors)
                self._errors.append(_error_of(durations) if self.are_samples else Deviation())
            values = durations if stretch == 1.0 else [each * stretch for each in durations]
            self._numbers[key] = len(self._all)
            self._all.append(Distribution(values, self._mean_of[id(durations)]))
        return self._numbers[key]

    def draw(self, draw_number: Callable[[], float]) -> Sequence[Sequence[float]]:
        """Return the durations of one draw, by the numbers of the distributions."""
        common = _draw_factor(self.common_deviation, draw_number)
        factors = [common * _draw_factor(error, draw_number) for error in self._errors]
        return [_longer_by(factors[each.mean], each.values) for each in self._all]


def _longer_by(factor: float, values: Sequence[float]) -> Sequence[float]:
    return values if factor == 1.0 else [value * factor for value in values]


def _error_of(durations: Sequence[float]) -> Deviation:
    """Return the standard error of a mean."""
    mean, count = statistics.fmean(durations), len(durations)
    if not mean:
        return Deviation()
    freedom = PRIOR_SAMPLES + count - 1
    squares = PRIOR_SAMPLES * PRIOR_DEVIATION**2 + sum((each / mean - 1.0) ** 2 for each in durations)
    return Deviation(math.sqrt(squares / freedom / count), freedom)


def _draw_factor(deviation: Deviation, draw_number: Callable[[], float]) -> float:
    return math.exp(deviation.share * _draw_t(deviation.freedom, draw_number)) if deviation.share else 1.0


def _draw_normal(draw_number: Callable[[], float]) -> float:
    return _NORMAL.inv_cdf(max(draw_number(), LEAST_NUMBER))


def _draw_t(freedom: int, draw_number: Callable[[], float]) -> float:
    normal = _draw_normal(draw_number)
    if freedom >= MANY:
        return normal
    squares = sum(_draw_normal(draw_number) ** 2 for _ in range(freedom))
    return normal / math.sqrt(squares / freedom)
