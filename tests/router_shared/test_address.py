"""Where Redis is, and that its password is told to nobody."""

from __future__ import annotations

import pytest

from kllm_router.shared.address import RedisAddress, parse_address, read_address
from kllm_router.shared.exceptions import AddressError


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("redis://cache:7000", RedisAddress("cache", 7000)),
        ("redis://cache", RedisAddress("cache", 6379)),
        ("rediss://u:p%40ss@cache:1/2\n", RedisAddress("cache", 1, 2, "u", "p@ss", tls=True)),
        ("redis://:secret@[::1]:6379/", RedisAddress("::1", 6379, password="secret")),
    ],
)
def test_a_url_says_where_and_as_whom(url, address):
    assert parse_address(url) == address


@pytest.mark.parametrize(
    "url",
    [
        "", "cache:6379", "http://:secret@cache", "redis://", "redis://:secret@cache:port", "redis://:secret@cache/one",
        "redis://:secret@cache?db=1", "redis://:secret#x@cache", "redis://:secret@[cache", "redis://:secret@cache:99999",
    ],
)  # fmt: skip
def test_another_form_is_refused_without_the_password(url):
    with pytest.raises(AddressError) as caught:
        parse_address(url)
    assert "secret" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_neither_text_nor_representation_has_the_password():
    address = parse_address("redis://me:secret@cache:7000/1")
    assert str(address) == "cache:7000/1"
    assert "secret" not in repr(address)


def test_a_file_is_read_anew(tmp_path):
    file = tmp_path / "url"
    with pytest.raises(AddressError, match=r"url: cannot be read: No such file"):
        read_address(file)
    file.write_text("redis://:a@cache:1\n")
    assert read_address(file).password == "a"
    file.write_text("redis://:b@cache:1\n")
    assert read_address(file).password == "b"
    file.write_bytes(b"\xff")
    with pytest.raises(AddressError, match="url: not text"):
        read_address(file)
