"""The chart's roles against the table of what the code does."""

from __future__ import annotations

import pytest
from charts.chart_helpers import CHART, notes, of_kind, render

from kllm_operator.render.permissions import DEFINITIONS, ELECTION, OPERATOR


def grants(role):
    return {
        (group, resource, verb)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def table(rules):
    return {grant for rule in rules for grant in rule.grants()}


def bound(documents, role):
    """Who holds a role, as (kind of the binding, its namespace, account)."""
    return {
        (each["kind"], each["metadata"].get("namespace"), subject["name"])
        for each in [*of_kind(documents, "ClusterRoleBinding"), *of_kind(documents, "RoleBinding")]
        if each["roleRef"]["name"] == role["metadata"]["name"] and each["roleRef"]["kind"] == role["kind"]
        for subject in each["subjects"]
        if role["metadata"].get("namespace") in {None, each["metadata"].get("namespace")}
    }


def test_the_operator_holds_exactly_what_it_uses_in_the_whole_cluster():
    documents = render()
    (role,) = of_kind(documents, "ClusterRole", "kllm-operator")

    assert grants(role) == table(OPERATOR)
    assert bound(documents, role) == {("ClusterRoleBinding", None, "kllm")}


def test_with_named_namespaces_it_holds_the_same_there_and_nothing_beyond():
    documents = render({"watchNamespaces": ["team-a", "team-b"]})
    roles = of_kind(documents, "Role", "kllm")

    assert [role["metadata"]["namespace"] for role in roles] == ["team-a", "team-b"]
    for role in roles:
        assert grants(role) == table(OPERATOR)
        assert bound(documents, role) == {("RoleBinding", role["metadata"]["namespace"], "kllm")}
    assert not of_kind(documents, "ClusterRole", "kllm-operator")
    assert not [
        each
        for each in of_kind(documents, "ClusterRoleBinding")
        if any(subject["name"] == "kllm" for subject in each["subjects"])
    ]


def test_leader_election_has_a_role_of_its_own_in_the_operators_namespace():
    documents = render()
    (role,) = of_kind(documents, "Role", "kllm-election")

    assert grants(role) == table(ELECTION)
    assert bound(documents, role) == {("RoleBinding", "kllm-system", "kllm")}
    assert not of_kind(render({"operator": {"replicas": 1, "leaderElection": {"enabled": False}}}), "Role")


def test_the_kinds_are_written_by_a_job_whose_account_goes_with_it():
    documents = render()
    (role,) = of_kind(documents, "ClusterRole", "kllm-crds")

    assert grants(role) == table(DEFINITIONS)
    assert bound(documents, role) == {("ClusterRoleBinding", None, "kllm-crds")}
    for kind in ("ServiceAccount", "ClusterRole", "ClusterRoleBinding"):
        (made,) = of_kind(documents, kind, "kllm-crds")
        assert made["metadata"]["annotations"]["helm.sh/hook"] == "pre-install,pre-upgrade"
        assert "hook-succeeded" in made["metadata"]["annotations"]["helm.sh/hook-delete-policy"]


def test_only_creation_of_kinds_is_not_limited_to_their_names():
    (role,) = of_kind(render(), "ClusterRole", "kllm-crds")

    assert [rule["verbs"] for rule in role["rules"] if "resourceNames" not in rule] == [["create"]]


@pytest.mark.parametrize("values", [{}, {"watchNamespaces": ["a"]}])
def test_no_role_has_a_wildcard(values):
    documents = render(values)

    for role in [*of_kind(documents, "ClusterRole"), *of_kind(documents, "Role")]:
        assert not any("*" in part for grant in grants(role) for part in grant)


def test_people_get_the_kinds_with_the_clusters_own_roles():
    documents = render()
    (view,), (edit,) = of_kind(documents, "ClusterRole", "kllm-view"), of_kind(documents, "ClusterRole", "kllm-edit")

    assert {verb for _, _, verb in grants(view)} == {"get", "list", "watch"}
    assert view["metadata"]["labels"]["rbac.authorization.k8s.io/aggregate-to-view"] == "true"
    assert "rbac.authorization.k8s.io/aggregate-to-view" not in edit["metadata"]["labels"]
    assert ("kllm.io", "prefillpools/scale", "patch") in grants(edit)
    assert not any(resource.endswith("/status") for _, resource, _ in grants(edit))
    assert not of_kind(render({"rbac": {"aggregate": False}}), "ClusterRole", "kllm-view")


@pytest.mark.parametrize("values", [{}, {"watchNamespaces": ["a"]}])
def test_without_rbac_no_role_is_made_for_anyone_and_the_readme_names_those_that_an_admin_makes(values):
    documents = render({**values, "rbac": {"create": False}})
    made = render(values)
    kinds = ("ClusterRole", "Role", "ClusterRoleBinding", "RoleBinding")

    assert not [each for kind in kinds for each in of_kind(documents, kind)]
    assert {each["metadata"]["name"] for each in of_kind(documents, "ServiceAccount")} == {
        "kllm", "kllm-crds", "kllm-test"
    }  # fmt: skip
    told = (CHART / "README.md").read_text().split("## Roles")[1].split("\n## ")[0]
    for role in [*of_kind(made, "ClusterRole"), *of_kind(made, "Role")]:
        assert f"`{role['metadata']['name']}`" in told


def test_the_notes_say_that_roles_are_missing():
    assert "an admin has to make" in notes({"rbac": {"create": False}})
    assert "an admin has to make" not in notes()
