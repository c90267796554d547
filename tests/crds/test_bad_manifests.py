"""Manifests that cannot be served are refused before they are stored, or by the models that the operator reads with."""

import pytest
from crds.admission import admit
from crds.bad_manifests import bad_manifests

from kllm_core.conditions import ConditionType, Reason
from kllm_core.kinds.manifest import ManifestError, check_pool, check_service

ALL = bad_manifests()
REFUSED = [each for each in ALL if each.refused]
CHANGES = [each for each in REFUSED if each.change]
TOLD = [each for each in ALL if each.condition]


def named(cases):
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.name)


def check(manifest):
    return check_service(manifest) if manifest["kind"] == "InferenceService" else check_pool(manifest)


def test_there_are_enough_of_them():
    """The issue asks for twenty on a real API server."""
    assert len(REFUSED) >= 20
    assert len(TOLD) >= 5


@named(REFUSED)
def test_what_schema_and_rules_can_see_is_refused_with_the_reason(case):
    reasons = admit(case.change, old=case.manifest) if case.change else admit(case.manifest)

    assert case.refused in "; ".join(reasons)
    assert len(reasons) == 1, "a bad manifest has one fault, so that its message is the only one"


@named(CHANGES)
def test_a_change_is_refused_only_as_a_change(case):
    """Each side of it could be made as a new object."""
    assert admit(case.manifest) == []
    assert admit(case.change) == []
    assert check(case.manifest)
    assert check(case.change)


@named([each for each in REFUSED if not each.change])
def test_the_models_refuse_what_the_api_server_refuses(case):
    with pytest.raises(ManifestError) as caught:
        check(case.manifest)

    assert len(caught.value.problems) == 1


@named(TOLD)
def test_what_only_the_operator_can_see_is_stored(case):
    assert admit(case.manifest) == []
    assert case.condition.type in list(ConditionType)
    assert case.condition.reason in list(Reason)


@named(TOLD)
def test_the_models_refuse_what_only_they_can_express(case):
    """An invalid spec is what the operator cannot read; it reads all else and tells what it finds."""
    if case.condition.reason != Reason.INVALID_SPEC:
        assert check(case.manifest)
        return
    with pytest.raises(ManifestError, match=case.condition.message):
        check(case.manifest)
