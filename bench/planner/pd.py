"""Prefill and decode pools on recorded traces: tuned on the first half of each, reported on the second.

python bench/planner/pd.py [--traces FOLDER] [--jobs N] [--again POLICY] [--quick] [--only CASE ...] [--start SECONDS]
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

import cases
import choosing
import loads
import store
import sweeps

_MOST_STATIC = 12


class Tuning:
    """One case: every law with every setting on the first half, the chosen ones on the second."""

    def __init__(self, case: str, *, start: int, quick: bool, runs: store.Store) -> None:
        self._common = {"case": case, "start": start}
        self._quick, self._runs = quick, runs

    def laws(self) -> dict[str, list[choosing.Tried]]:
        """By policy, all settings and their figures on the first half."""
        specs = [self._spec(policy, knobs) for policy, knobs in sweeps.of(sweeps.TWO_POOLS, quick=self._quick)]
        figures = self._runs.get(specs)
        tried: dict[str, list[choosing.Tried]] = {"static": self._statics()}
        for spec, figure in zip(specs, figures, strict=True):
            tried.setdefault(spec["policy"], []).append((spec, [figure]))
        return tried

    def second_half(self, spec: cases.Spec) -> dict[str, float]:
        """Figures of one setting on the second half."""
        return self._runs.get([{**spec, "half": 2}])[0]

    def _spec(self, policy: str, knobs: sweeps.Knobs | None = None) -> cases.Spec:
        return {**self._common, "half": 1, "policy": policy, "knobs": knobs or {}}

    def _statics(self) -> list[choosing.Tried]:
        """Fixed counts: for each of decode the least of prefill that attains the goal, found by halving.

        More of either never attains less, but for chance. From the fewest of decode on, a further one is tried as long
        as it spares enough of prefill.
        """
        tried: list[choosing.Tried] = []
        most = _MOST_STATIC
        for decode in range(1, 3 if self._quick else _MOST_STATIC + 1):
            mine = list(self._halved(decode, most))
            tried += mine
            good = [int(spec["policy"].partition(":")[2].partition(",")[0]) for spec, figures in mine
                    if choosing.attained(figures) >= choosing.GOAL]  # fmt: skip
            if good and min(good) == most and most < _MOST_STATIC:
                break
            most = min(good, default=most)
            if most == 1:
                break
        return tried

    def _halved(self, decode: int, most: int) -> Iterator[choosing.Tried]:
        low, high = 1, most
        while low < high:
            middle = (low + high) // 2
            result = self._static(middle, decode)
            yield result
            low, high = (low, middle) if choosing.attained(result[1]) >= choosing.GOAL else (middle + 1, high)
        yield self._static(low, decode)

    def _static(self, prefill: int, decode: int) -> choosing.Tried:
        spec = self._spec(f"static:{prefill},{decode}")
        return spec, self._runs.get([spec])


def chosen(tuning: Tuning) -> dict[str, dict[str, choosing.Tried]]:
    """By policy: `cheapest` at the goal and `equal`, the best for what kLLM's cheapest costs; with second halves."""
    laws = tuning.laws()
    budget = choosing.cost(_of(laws["slo"], choosing.cheapest(laws["slo"])))
    result = {}
    for policy, tried in laws.items():
        picked = {"cheapest": choosing.cheapest(tried), "equal": choosing.best_within(tried, budget * 1.02)}
        result[policy] = {name: (spec, [tuning.second_half(spec)]) for name, spec in picked.items()}
    return result


def _of(tried: Sequence[choosing.Tried], wanted: cases.Spec) -> Sequence[dict[str, float]]:
    return next(figures for spec, figures in tried if spec is wanted)


def main() -> None:
    parser = store.options(__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", choices=tuple(cases.TRACES), help="one case; may be repeated")
    parser.add_argument("--start", type=int, default=60, help="seconds until a new instance serves")
    given = parser.parse_args()
    loads.check_traces(given.traces)
    runs = store.Store("pd", given)
    for case in given.only or cases.TRACES:
        print(f"--- {case}", file=sys.stderr)
        chosen(Tuning(case, start=given.start, quick=given.quick, runs=runs))
        runs.tidy()
    print("done; bench/planner/document.py writes the tables", file=sys.stderr)


if __name__ == "__main__":
    main()
