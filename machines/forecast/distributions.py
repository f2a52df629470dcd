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


@dataclass(slots=True)
class Distribution:
    """The durations of a step, all equally likely; `error`: how uncertain their mean is.

    `drawn` are those of the present draw.  Each draw changes this list, because a look-up for each step would
    cost a tenth of a forecast's time.
    """

    values: Sequence[float]
    error: int
    drawn: list[float]


@dataclass(slots=True)
class Distributions:
    """What the durations of all steps are drawn from; the first two fields are as in Assumptions."""

    common_deviation: Deviation
    are_samples: bool
    _errors: list[Deviation] = field(default_factory=list)
    """How uncertain the mean of each step's durations is."""
    _by_source: dict[tuple[int, float], Distribution] = field(default_factory=dict)
    """By the id() of the durations as an object, which the walk keeps, and what multiplies them."""
    _error_numbers: dict[int, int] = field(default_factory=dict)

    def drawn_of(self, durations: Sequence[float], stretch: float) -> Sequence[float]:
        """Return these durations, each multiplied by `stretch`, as each draw will change them."""
        key = (id(durations), stretch)
        if key not in self._by_source:
            if id(durations) not in self._error_numbers:
                self._error_numbers[id(durations)] = len(self._errors)
                self._errors.append(_error_of(durations) if self.are_samples else Deviation())
            values = [each * stretch for each in durations]
            self._by_source[key] = Distribution(values, self._error_numbers[id(durations)], list(values))
        return self._by_source[key].drawn

    def draw(self, draw_number: Callable[[], float]) -> None:
        """Draw what all steps and each step have in common."""
        common = _draw_factor(self.common_deviation, draw_number)
        factors = [common * _draw_factor(error, draw_number) for error in self._errors]
        for each in self._by_source.values():
            if self.common_deviation.share or self._errors[each.error].share:
                each.drawn[:] = [value * factors[each.error] for value in each.values]


def _error_of(durations: Sequence[float]) -> Deviation:
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
