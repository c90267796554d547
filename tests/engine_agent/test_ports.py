from __future__ import annotations

import random
import socket

import pytest

from kllm_engine.agent.ports import free_ports


def test_ports_are_different_and_can_be_bound() -> None:
    ports = free_ports(5, rng=random.Random(1))
    assert len(set(ports)) == 5
    for port in ports:
        with socket.socket() as channel:
            channel.bind(("127.0.0.1", port))


def test_a_port_in_use_is_not_given_out() -> None:
    first = free_ports(1, rng=random.Random(2))[0]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", first))
        taken.listen()
        assert free_ports(1, rng=random.Random(2)) != [first]


def test_a_port_that_is_kept_for_something_else_is_not_given_out() -> None:
    first = free_ports(1, rng=random.Random(4))[0]
    assert free_ports(1, rng=random.Random(4), but={first}) != [first]


def test_too_many_ports_are_an_error() -> None:
    with pytest.raises(OSError, match="free TCP ports"):
        free_ports(100_000, rng=random.Random(3))
