"""What each part of the planner is worth: the same load without it.

python bench/planner/ablation.py [--traces FOLDER] [--jobs N] [--again slo] [--quick]
"""

from __future__ import annotations

import sys

import cases
import loads
import store

SEEDS = (10, 11)
TRACES = ("mooncake", "servegen-r1", "mix")

ABLATIONS: dict[str, cases.Spec] = {
    "nothing": {},
    "predictions (measured only)": {"without": "predictions"},
    "measurements (predicted only)": {"without": "measurements"},
    "the forecast": {"without": "forecast"},
    "head-room (quantile 0.5, nothing spare, no margin)": {
        "knobs": {"forecast_quantile": 0.5, "spare": 0.0, "lead_margin_seconds": 0.0}
    },
    "flips": {"flippable": False},
    "slots": {"slots": 0},
    "warmth (timing and start times are learned)": {"warm": False},
}
"""By what is left out: what differs in the description of a run."""
_ONLY_TWO_POOLS = {"flips", "slots"}


def specs(*, quick: bool) -> dict[str, dict[str, list[cases.Spec]]]:
    """Runs by case and by what is left out."""
    seeds = SEEDS[:1] if quick else SEEDS
    ramp = [{"case": "ramp", "start": 10, "policy": "slo", "seed": seed} for seed in seeds]
    halves = [
        {"case": name, "start": 60, "policy": "slo", "half": 2, "slots": 1}
        for name in (TRACES[:1] if quick else TRACES)
    ]
    bases = {"ramp": ramp, **{str(each["case"]): [each] for each in halves}}
    return {
        case: {
            name: [{**base, **change} for base in mine]
            for name, change in ABLATIONS.items()
            if case != "ramp" or name not in _ONLY_TWO_POOLS
        }
        for case, mine in bases.items()
    }


def main() -> None:
    given = store.options(__doc__.splitlines()[0]).parse_args()
    loads.check_traces(given.traces)
    runs = store.Store("ablation", given)
    runs.get(spec for mine in specs(quick=given.quick).values() for each in mine.values() for spec in each)
    runs.tidy()
    print("done; bench/planner/document.py writes the tables", file=sys.stderr)


if __name__ == "__main__":
    main()
