"""What responses mean, and where requests go."""

from __future__ import annotations

import json

import pytest

from kllm_operator.kube import exceptions
from kllm_operator.kube.exceptions import error_of
from kllm_operator.kube.resources import CHILDREN, DEPLOYMENTS, PODS, resource_of


def status(message="told", reason="", **more):
    return json.dumps({"kind": "Status", "message": message, "reason": reason, **more}).encode()


@pytest.mark.parametrize(
    ("code", "body", "kind"),
    [
        (400, status(), exceptions.InvalidError),
        (401, status(), exceptions.ForbiddenError),
        (403, status(), exceptions.ForbiddenError),
        (404, status(reason="NotFound"), exceptions.NotFoundError),
        (409, status(reason="Conflict"), exceptions.ConflictError),
        (409, status(reason="AlreadyExists"), exceptions.AlreadyExistsError),
        (410, status(reason="Expired"), exceptions.GoneError),
        (422, status(reason="Invalid"), exceptions.InvalidError),
        (429, status(reason="TooManyRequests"), exceptions.TooManyError),
        (500, status(), exceptions.UnreachableError),
        (503, b"<html>upstream</html>", exceptions.UnreachableError),
        (504, b"", exceptions.UnreachableError),
        (418, b"[]", exceptions.KubeError),
    ],
)
def test_each_response_has_its_error(code, body, kind):
    error = error_of(code, body)
    assert type(error) is kind
    assert error.status == code
    assert str(error)


def test_a_patch_with_another_uid_is_a_conflict_although_the_server_calls_it_invalid():
    causes = [{"field": "metadata.uid", "message": "field is immutable", "reason": "FieldValueInvalid"}]
    assert type(error_of(422, status(reason="Invalid", details={"causes": causes}))) is exceptions.ConflictError


def test_an_unknown_field_is_invalid_although_the_server_answers_500():
    told = status("failed to create typed patch object (default/a; /v1, Kind=Pod): .spec.x: field not declared")
    assert type(error_of(500, told)) is exceptions.InvalidError


def test_the_server_says_when_to_come_again():
    assert error_of(429, status(), retry_after="7").retry_after == 7
    assert error_of(429, status(), retry_after="Wed, 21 Oct 2026 07:28:00 GMT").retry_after is None
    assert error_of(429, status()).retry_after is None


def test_a_long_message_is_cut():
    assert len(str(error_of(400, status("x" * 100_000)))) < 1100


def test_paths_are_those_of_the_api():
    assert PODS.path(namespace=None) == "/api/v1/pods"
    assert PODS.path(namespace="a", name="b", subresource="status") == "/api/v1/namespaces/a/pods/b/status"
    assert DEPLOYMENTS.path(namespace="a") == "/apis/apps/v1/namespaces/a/deployments"


@pytest.mark.parametrize("name", ["..", ".", ""])
def test_a_name_cannot_lead_elsewhere(name):
    with pytest.raises(ValueError, match="no name"):
        PODS.path(namespace=name)
    assert PODS.path(namespace="a", name="../secrets/b") == "/api/v1/namespaces/a/pods/..%2Fsecrets%2Fb"


def test_every_child_is_found_by_its_kind():
    for resource in CHILDREN:
        assert resource_of({"apiVersion": resource.api_version, "kind": resource.kind}) is resource
    with pytest.raises(ValueError, match="Widget of v1"):
        resource_of({"apiVersion": "v1", "kind": "Widget"})
