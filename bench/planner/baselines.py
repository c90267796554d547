"""One pool on llm-d's ramp: its own law with its own figures, and the curve of all laws over start times.

python bench/planner/baselines.py [--traces FOLDER] [--jobs N] [--again POLICY] [--quick]
    [--only published|curve] [--starts SECONDS ...]
"""

from __future__ import annotations

import sys

import cases
import choosing
import store
import sweeps

STARTS = (2, 10, 30, 60, 100, 300)
TUNED_ON = (0,)
REPORTED_ON = (10, 11)
EPISODES = tuple(range(20, 32))

PUBLISHED = {
    "as it is": {},
    "cold predictor": {"signal": "cold"},
    "measured instead of predicted": {"signal": "measured"},
    "mean instead of P90": {"statistic": "mean"},
    "P90 of the values, not of a histogram": {"statistic": "exact"},
}
"""Variants of llm-d's law in its own set-up: 100 s starts, the router that takes the engine with the least load."""


def published(*, quick: bool) -> dict[str, list[cases.Spec]]:
    """Runs of llm-d's own figures by variant."""
    seeds = EPISODES[:1] if quick else EPISODES
    common = {"case": "ramp", "start": 100, "routing": "least-load"}
    laws = {name: {"policy": "llm-d", "knobs": knobs} for name, knobs in PUBLISHED.items()}
    laws |= {"static 8": {"policy": "static:8"}, "clairvoyant": {"policy": "clairvoyant", "knobs": {"kv_share": 0.8}}}
    return {name: [{**common, **law, "seed": seed} for seed in seeds] for name, law in laws.items()}


def tried(start: int, policy: str, knobs: sweeps.Knobs) -> list[cases.Spec]:
    """Runs that knobs are judged by."""
    spec = {"case": "ramp", "start": start, "policy": policy, "knobs": knobs}
    return [{**spec, "seed": seed} for seed in TUNED_ON]


def reported(spec: cases.Spec, *, quick: bool) -> list[cases.Spec]:
    """Runs with other arrivals that are reported for the knobs that were chosen."""
    return [{**spec, "seed": seed} for seed in (REPORTED_ON[:1] if quick else REPORTED_ON)]


def main() -> None:
    parser = store.options(__doc__.splitlines()[0])
    parser.add_argument("--only", choices=("published", "curve"), help="one of both parts")
    parser.add_argument("--starts", type=int, nargs="+", default=STARTS, choices=STARTS, help="of the curve")
    given = parser.parse_args()
    if given.only != "curve":
        runs = store.Store("published", given)
        runs.get(spec for specs in published(quick=given.quick).values() for spec in specs)
        runs.tidy()
    if given.only != "published":
        runs = store.Store("curve", given)
        starts = given.starts[:1] if given.quick else given.starts
        trials = [
            (start, policy, knobs)
            for start in starts
            for policy, knobs in sweeps.of(sweeps.ONE_POOL, quick=given.quick)
        ]
        runs.get(spec for trial in trials for spec in tried(*trial))
        best = [
            choosing.cheapest([(specs[0], runs.get(specs)) for specs in (tried(*trial) for trial in mine)])
            for start in starts
            for policy in sweeps.ONE_POOL
            if (mine := [trial for trial in trials if trial[:2] == (start, policy)])
        ]
        runs.get(spec for each in best for spec in reported(each, quick=given.quick))
        runs.tidy()
    print("done; bench/planner/document.py writes the tables", file=sys.stderr)


if __name__ == "__main__":
    main()
