"""The rules that the API server evaluates and those that the models check say the same, message for message."""

import pytest
from crds.admission import admit
from hypothesis import event, given, settings
from hypothesis import strategies as st

from kllm_core.kinds.manifest import ManifestError, check_service

SIZES = st.sampled_from([1, 1, 1, 2, 3, 4])
COUNTS = st.integers(0, 3)
URIS = st.sampled_from(
    [
        "demo://smollm2-135m", "demo://x", "demo://", "hf://org/name", "hf://org/name@main", "hf://org", "hf://a/b/c",
        "hf://ö/b", "hf://a/b\n", "pvc://claim", "pvc://claim/", "pvc://claim/a/b", "pvc://Claim", "pvc://claim/../x",
        "pvc://claim/..", "pvc://claim//x", "/models/x", "/models/../x", "/models/..", "/", "/models/with space",
        "models/x", "s3://bucket/x", "://", "hf:/x",
    ]
)  # fmt: skip
NAMES = st.sampled_from(["chat", "a", "a" * 40, "a" * 41, "4chat", "chat-", "Chat", "ch.at", "chat\n", "cha-t4"])
VARIABLES = st.sampled_from([{"name": "POD_IP"}, {"name": "OTHER", "value": "1"}])
CONTAINERS = st.fixed_dictionaries(
    {"name": st.sampled_from(["engine", "model", "router", "sidecar"])},
    optional={
        "command": st.just(["x"]),
        "args": st.just([]),
        "ports": st.just([{"containerPort": 1}]),
        "env": st.lists(VARIABLES, max_size=2, unique_by=lambda each: each["name"]),
        "image": st.just("x"),
    },
)
TEMPLATES = st.fixed_dictionaries(
    {},
    optional={
        "metadata": st.just({"labels": {"a": "b"}}),
        "spec": st.fixed_dictionaries(
            {"nodeSelector": st.none()},
            optional={
                "containers": st.lists(CONTAINERS, max_size=2, unique_by=lambda each: each["name"]),
                "initContainers": st.lists(CONTAINERS, max_size=1),
            },
        ),
    },
)
PARALLELISM = st.fixed_dictionaries(dict.fromkeys(["tensor", "data", "pipeline", "expert", "context"], SIZES))
ACCELERATORS = st.fixed_dictionaries({"count": st.sampled_from([0, 1, 2, 8, 64])})
ARGUMENTS = st.dictionaries(
    st.sampled_from(["chunked-prefill-size", "port", "ep", "host"]), st.integers(1, 9), max_size=2
)
BOUNDS = {"minReplicas": COUNTS, "maxReplicas": COUNTS}
ROLES = st.fixed_dictionaries(
    {},
    optional=BOUNDS
    | {"parallelism": PARALLELISM, "accelerator": ACCELERATORS, "engineArgs": ARGUMENTS, "template": TEMPLATES},
)
ABUNDANT = st.just({"count": 64})

SPECS = {
    "address": st.fixed_dictionaries({"model": st.fixed_dictionaries({"uri": URIS, "name": st.just("m")})}),
    "spread": st.fixed_dictionaries(
        {
            role: st.fixed_dictionaries({"parallelism": PARALLELISM, "accelerator": ABUNDANT})
            for role in ("prefill", "decode")
        }
    ),
    "accelerators": st.fixed_dictionaries(
        {"prefill": st.fixed_dictionaries({"parallelism": PARALLELISM, "accelerator": ACCELERATORS})}
    ),
    "counts": st.fixed_dictionaries(
        {role: st.fixed_dictionaries({}, optional=BOUNDS) for role in ("prefill", "decode")},
        optional={
            "gpuBudget": st.integers(1, 6),
            "rollout": st.fixed_dictionaries({}, optional={"surge": COUNTS, "maxUnavailable": COUNTS}),
        },
    ),
    "templates": st.fixed_dictionaries(
        {
            "decode": st.fixed_dictionaries({"template": TEMPLATES}),
            "router": st.fixed_dictionaries({"template": TEMPLATES}),
        }
    ),
    "arguments": st.fixed_dictionaries({"prefill": st.fixed_dictionaries({"engineArgs": ARGUMENTS})}),
    "everything": st.fixed_dictionaries(
        {},
        optional={
            "model": st.fixed_dictionaries({"uri": URIS, "name": st.just("m")}),
            "prefill": ROLES,
            "decode": ROLES,
            "gpuBudget": st.integers(1, 8),
        },
    ),
}


def manifest(spec, name="chat"):
    base = {
        "model": {"uri": "demo://smollm2-135m", "name": "m"},
        "objectives": {"ttftMilliseconds": 1000, "tpotMilliseconds": 150},
    }
    return {
        "apiVersion": "kllm.io/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": name},
        "spec": base | spec,
    }


def problems_of(manifest):
    try:
        check_service(manifest)
    except ManifestError as error:
        return error.problems
    return []


def check_agreement(document):
    reasons, problems = admit(document), problems_of(document)
    event("refused" if reasons else "stored")

    assert bool(reasons) == bool(problems), (reasons, problems)
    # The models look at a whole only when its parts are sound, so they may say less; never anything else.
    messages = {reason.partition(': Invalid value: "')[2].partition('": ')[2] for reason in reasons}
    said = {piece for problem in problems for piece in problem.partition(": ")[2].split("; ")}
    assert said <= {piece for message in messages for piece in message.split("; ")}, (problems, reasons)


@pytest.mark.parametrize("part", sorted(SPECS))
@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_what_the_models_take_is_stored_and_what_they_refuse_is_refused(part, data):
    check_agreement(manifest(data.draw(SPECS[part])))


@given(name=NAMES)
def test_names_are_taken_and_refused_alike(name):
    check_agreement(manifest({}, name))
