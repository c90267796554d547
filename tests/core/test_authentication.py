"""The fleet token."""

import pytest

from kllm_core.authentication import bearer, create_token_file, metadata_is_valid, read_token_file


def test_a_created_token_is_private_and_valid(tmp_path):
    path = tmp_path / "token"

    token = create_token_file(path)

    assert path.stat().st_mode & 0o777 == 0o600
    assert read_token_file(path) == token
    assert metadata_is_valid([("authorization", bearer(token))], token)


@pytest.mark.parametrize(
    "metadata", [[], [("authorization", "Bearer wrong")], [("x", "y")], [("authorization", b"\xff")]]
)
def test_calls_without_the_token_are_not_valid(metadata):
    assert not metadata_is_valid(metadata, "a-long-enough-token")


def test_a_link_in_place_of_the_token_file_is_not_followed(tmp_path):
    target = tmp_path / "target"
    target.write_text("keep")
    (tmp_path / "token").symlink_to(target)

    with pytest.raises(OSError, match="symbolic"):
        create_token_file(tmp_path / "token")
    assert target.read_text() == "keep"


def test_a_short_token_is_refused(tmp_path):
    (tmp_path / "token").write_text("short")

    with pytest.raises(ValueError, match="at least 16"):
        read_token_file(tmp_path / "token")
