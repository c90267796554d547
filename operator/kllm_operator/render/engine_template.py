"""Merges pod templates over a rendered pod, as strategic merge patches do, and guards what they may not touch. Pure."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

_POD_LISTS = {
    "containers": "name", "initContainers": "name", "volumes": "name", "imagePullSecrets": "name",
    "resourceClaims": "name",
}  # fmt: skip
"""Lists of a pod that are merged item by item, with the field that names an item. Every other list is replaced."""
_CONTAINER_LISTS = {"env": "name", "volumeMounts": "mountPath", "volumeDevices": "devicePath"}
"""The same of a container."""
_CONTAINERS = ("containers", "initContainers")

_REPLACED = frozenset({"volumes"})
"""Lists whose items are replaced as a whole: a volume has one source."""

_OWN_PREFIXES = ("kllm.io/", "app.kubernetes.io/")


class TemplateError(ValueError):
    """A pod template that cannot be used.

    Attributes:
        field: path of what is wrong, from the manifest's root.
        message: what is wrong with it and what to do.
    """

    def __init__(self, field: str, message: str) -> None:
        self.field = field
        self.message = message
        super().__init__(f"{field}: {message}")


@dataclass(frozen=True)
class Reserved:
    """What a template may not touch.

    Attributes:
        spec: fields of the pod's spec.
        containers: names of rendered containers, by the list that they are in.
        container_fields: fields of those.
        env: names of their environment.
        mounts: paths at which they have something mounted.
        resources: resources of theirs, with what sets them instead.
        volumes: names of volumes.
    """

    spec: frozenset[str] = frozenset()
    containers: Mapping[str, frozenset[str]] = field(default_factory=dict)
    container_fields: frozenset[str] = frozenset()
    env: frozenset[str] = frozenset()
    mounts: frozenset[str] = frozenset()
    resources: Mapping[str, str] = field(default_factory=dict)
    volumes: frozenset[str] = frozenset()


def merged(
    pod: Mapping[str, Any], template: Mapping[str, Any] | None, *, where: str, reserved: Reserved
) -> dict[str, Any]:
    """The pod with a template merged over it; neither of the two is changed.

    What the template has for a reserved container that the pod does not have is left out.

    Args:
        pod: with metadata and spec.
        template: with labels and annotations under `metadata` and any of a pod's fields under `spec`.
        where: path of the template, for errors.
        reserved: what it may not touch.

    Raises:
        TemplateError: it has something that no template has, or touches what it may not.
    """
    if template is None:
        return copy.deepcopy(dict(pod))
    _check(template, where, reserved)
    metadata = _over(pod["metadata"], template.get("metadata", {}), {})
    return {"metadata": metadata, "spec": _over(pod["spec"], _fitting(template, pod, reserved), _POD_LISTS)}


def _fitting(template: Mapping[str, Any], pod: Mapping[str, Any], reserved: Reserved) -> Mapping[str, Any]:
    """The template's spec without what it has for rendered containers that this pod does not need."""
    spec = dict(template.get("spec", {}))
    for kind in spec.keys() & reserved.containers.keys():
        there = {each["name"] for each in pod["spec"].get(kind, ())}
        unneeded = reserved.containers[kind] - there
        spec[kind] = [each for each in spec[kind] if each["name"] not in unneeded]
    return spec


def _over(base: Mapping[str, Any], patch: Mapping[str, Any], lists: Mapping[str, str]) -> dict[str, Any]:
    result = copy.deepcopy(dict(base))
    for name, value in patch.items():
        before = result.get(name)
        if value is None:
            result.pop(name, None)
        elif name in lists:
            result[name] = _list_over(before or [], value, name)
            if not result[name]:
                del result[name]
        elif isinstance(value, Mapping):
            result[name] = _over(before if isinstance(before, Mapping) else {}, value, {})
        else:
            result[name] = copy.deepcopy(value)
    return result


def _list_over(base: Iterable[Mapping[str, Any]], patch: Iterable[Mapping[str, Any]], name: str) -> list[Any]:
    key = {**_POD_LISTS, **_CONTAINER_LISTS}[name]
    inner = _CONTAINER_LISTS if name in _CONTAINERS else {}
    items = {item[key]: item for item in base}
    for item in patch:
        before = {} if name in _REPLACED else items.get(item[key], {})
        items[item[key]] = _over(before, item, inner)
    return list(items.values())


def _check(template: Mapping[str, Any], where: str, reserved: Reserved) -> None:
    _only(template, ("metadata", "spec"), where)
    metadata = _mapping(template.get("metadata", {}), f"{where}.metadata")
    _only(metadata, ("labels", "annotations"), f"{where}.metadata")
    for kind, values in metadata.items():
        _check_names(_mapping(values, f"{where}.metadata.{kind}"), f"{where}.metadata.{kind}")
    spec = _mapping(template.get("spec", {}), f"{where}.spec")
    _check_no_directives(spec, f"{where}.spec")
    _check_lists(spec, f"{where}.spec", _POD_LISTS)
    for name in sorted(spec.keys() & reserved.spec):
        raise TemplateError(f"{where}.spec.{name}", "kLLM sets it; leave it out")
    for volume in spec.get("volumes", ()):
        if volume["name"] in reserved.volumes:
            raise TemplateError(f"{where}.spec.volumes[{volume['name']}]", "kLLM mounts its own; take another name")
    for path, kind, container in _containers(spec, f"{where}.spec"):
        _check_lists(container, path, _CONTAINER_LISTS)
        _check_container(container, path, kind, reserved)


def _check_container(container: Mapping[str, Any], path: str, kind: str, reserved: Reserved) -> None:
    name = container["name"]
    if name not in reserved.containers.get(kind, ()):
        for other, names in reserved.containers.items():
            if name in names:
                raise TemplateError(path, f"{name} is one of {other}; write it there, or take another name")
        return
    for forbidden in sorted(container.keys() & reserved.container_fields):
        raise TemplateError(f"{path}.{forbidden}", "kLLM sets it; leave it out")
    for variable in container.get("env", ()):
        if variable["name"] in reserved.env:
            raise TemplateError(f"{path}.env[{variable['name']}]", "kLLM sets it; take another name")
    for mount in container.get("volumeMounts", ()):
        if str(mount["mountPath"]).rstrip("/") in reserved.mounts:
            raise TemplateError(f"{path}.volumeMounts[{mount['mountPath']}]", "kLLM mounts its own; take another path")
    _check_resources(_mapping(container.get("resources", {}), f"{path}.resources"), f"{path}.resources", reserved)


def _check_resources(resources: Mapping[str, Any], where: str, reserved: Reserved) -> None:
    for kind in ("limits", "requests"):
        amounts = _mapping(resources.get(kind, {}), f"{where}.{kind}")
        for name in sorted(amounts.keys() & reserved.resources.keys()):
            raise TemplateError(f"{where}.{kind}[{name}]", f"set {reserved.resources[name]} instead")


def _check_names(values: Mapping[str, Any], where: str) -> None:
    for name, value in values.items():
        if str(name).startswith(_OWN_PREFIXES):
            raise TemplateError(f"{where}[{name}]", "kLLM sets names with this prefix; take another one")
        if not isinstance(value, str):
            raise TemplateError(f"{where}[{name}]", f"must be text, is {_kind(value)}; put it in quotes")


def _check_no_directives(value: Any, where: str) -> None:
    if isinstance(value, list):
        for number, item in enumerate(value):
            _check_no_directives(item, f"{where}[{number}]")
    if isinstance(value, Mapping):
        for name, inner in value.items():
            if str(name).startswith("$"):
                raise TemplateError(f"{where}.{name}", "is a directive of patches; a template has values only")
            _check_no_directives(inner, f"{where}.{name}")


def _check_lists(part: Mapping[str, Any], where: str, lists: Mapping[str, str]) -> None:
    """Every list that is merged by name has names."""
    for name in part.keys() & lists.keys():
        _check_items(part[name], f"{where}.{name}", lists[name])


def _check_items(value: Any, where: str, key: str) -> None:
    if not isinstance(value, list):
        raise TemplateError(where, f"must be a list, is {_kind(value)}")
    seen: set[str] = set()
    for number, item in enumerate(value):
        name = _mapping(item, f"{where}[{number}]").get(key)
        if not isinstance(name, str) or not name:
            raise TemplateError(f"{where}[{number}].{key}", "is missing; it says which item is meant")
        if name in seen:
            raise TemplateError(f"{where}[{number}].{key}", f"there are two items {name!r}")
        seen.add(name)


def _containers(spec: Mapping[str, Any], where: str) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    for kind in _CONTAINERS:
        for container in spec.get(kind, ()):
            yield f"{where}.{kind}[{container['name']}]", kind, container


def _only(value: Any, names: tuple[str, ...], where: str) -> None:
    for name in _mapping(value, where):
        if name not in names:
            raise TemplateError(f"{where}.{name}", f"is unknown; there are {' and '.join(names)}")


def _mapping(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise TemplateError(where, f"must be a mapping, is {_kind(value)}")
    return value


def _kind(value: object) -> str:
    names = {type(None): "null", bool: "a truth value", str: "text", list: "a list", dict: "a mapping"}
    return names.get(type(value), "a number")
