"""Keys and their quotas, as clients meet them."""

from __future__ import annotations

import asyncio
import hashlib

import pytest
from router.fake_engine import delta, stream
from router.router_helpers import connected, router, until

from kllm_router.frontend.gate import Gate
from kllm_router.frontend.keys import KeyRing, KeysError, follow_keys, parse_keys, read_keys
from kllm_router.frontend.limiter import Limiter
from kllm_router.scheduling.quota import NOTHING, Quota, Spent
from kllm_router.shared.local import Alone


class Others(Alone):
    """What other routers let a key take, set by the test."""

    def __init__(self):
        self.taken: dict[str, Spent] = {}

    def spent(self, key, now):
        return self.taken.get(key, NOTHING)


def gate(text, *, others=None, refused=None):
    refused = [] if refused is None else refused
    limiter = Limiter(shared=others or Others(), on_refusal=refused.append)
    return Gate(keys=KeyRing(parse_keys(text)), limiter=limiter)


def bearer(key):
    return {"authorization": f"Bearer {key}"}


# --- the file


def test_a_file_may_hold_keys_or_their_hashes_with_names_and_limits():
    hashed = hashlib.sha256(b"secret-two").hexdigest()
    keys = parse_keys(
        "# people\n\nsecret-one\n"
        f"sha256:{hashed} name=team-a requests-per-minute=60 tokens-per-minute=2000 concurrency=4\n"
    )
    ring = KeyRing(keys)

    assert ring.find("Bearer secret-one").quota == Quota()
    found = ring.find("bearer  secret-two")
    assert (found.name, found.quota) == ("team-a", Quota(60, 2000, 4))
    for given in ("", "secret-one", "Basic secret-one", "Bearer", "Bearer other", f"Bearer sha256:{hashed}"):
        assert ring.find(given) is None
    assert "secret" not in repr(keys)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "holds no key"),
        ("# nothing\n", "holds no key"),
        ("sha256:abc", "line 1: after sha256:"),
        ("a\nb limit=3", "line 2: after the key there may be"),
        ("a requests-per-minute=0", "line 1: requests-per-minute= must be"),
        ("a concurrency=many", "line 1: concurrency= must be"),
        ("a name=", "line 1: name= must be"),
        ("a\na", "line 2: an earlier line has the same"),
        ("a name=x\nb name=x", "line 2: an earlier line has the same name"),
    ],
)
def test_a_line_that_is_wrong_is_named_and_no_key_is(tmp_path, text, said):
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(KeysError) as error:
        read_keys(path)
    assert said in str(error.value)
    assert str(path) in str(error.value)


async def test_a_file_that_changes_is_read_again_and_what_is_wrong_changes_nothing(tmp_path):
    path, told = tmp_path / "keys", []
    path.write_text("one")
    ring = KeyRing(read_keys(path))
    following = asyncio.create_task(follow_keys(path, ring, on_reload=told.append, seconds=0.01))

    path.write_text("two")
    await until(lambda: ring.find("Bearer two"))
    assert ring.find("Bearer one") is None
    path.write_text("two limit=x")
    await until(lambda: told == [True, False])
    assert ring.find("Bearer two")
    path.unlink()
    await until(lambda: told == [True, False, False])
    mounted = tmp_path / "new"
    mounted.write_text("three")
    path.symlink_to(mounted)
    await until(lambda: ring.find("Bearer three"))
    following.cancel()


# --- quotas


async def test_requests_above_a_keys_rate_are_refused_until_it_has_room_and_other_keys_are_not(caplog):
    refused = []
    keys = gate("one name=a requests-per-minute=2\ntwo name=b", refused=refused)
    async with router(gate=keys) as r, connected(r) as client:
        r.prefill_when_asked()
        r.decode.script = stream("x")
        for key, status in (("one", 200), ("one", 200), ("one", 429), ("two", 200)):
            client.post(stream=True, headers=bearer(key))
            response = await client.answer()
            assert response.status == status
            if status == 429:
                assert response.json["error"]["code"] == "rate_limit_exceeded"
                assert 50 <= int(response.headers["retry-after"]) <= 62
    assert refused == ["a"]


async def test_requests_that_run_bound_a_keys_concurrency():
    release = asyncio.Event()

    async def script(call, reply):
        reply.begin()
        reply.event(delta("x"))
        await release.wait()
        reply.chunk(b"data: [DONE]\n\n")
        reply.end()

    async with router(gate=gate("one concurrency=1")) as r, connected(r) as first, connected(r) as second:
        r.prefill_when_asked()
        r.decode.script = script
        first.post(stream=True, headers=bearer("one"))
        await first.head()
        second.post(stream=True, headers=bearer("one"))
        assert (await second.answer()).status == 429
        first.leave()
        await until(lambda: r.summaries)
        second.post(stream=True, headers=bearer("one"))
        assert (await second.head())[0] == 200
        release.set()


@pytest.mark.parametrize("ends", ["well", "client_leaves"])
async def test_prompts_and_what_was_generated_use_up_a_keys_tokens(ends):
    async def script(call, reply):
        reply.begin()
        reply.chunk(b': kllm-ids 7,8,9,10\n\ndata: {"choices":[{"delta":{"content":"x"}}]}\n\n')
        if ends == "well":
            reply.chunk(b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":4}}\n\ndata: [DONE]\n\n')
            reply.end()
        else:
            await asyncio.Event().wait()

    limited = gate("one name=a tokens-per-minute=9")
    async with router(gate=limited) as r, connected(r) as first, connected(r) as second:
        r.prefill_when_asked()
        r.decode.script = script
        first.post(stream=True, headers=bearer("one"))
        await first.head()
        await first.chunk()
        if ends == "client_leaves":
            first.leave()
        await until(lambda: limited.limiter.spent() == {"a": Spent(0, 1, 7)})
        second.post(stream=True, headers=bearer("one"))
        response = await second.answer()
        assert response.status == 429
        assert "7 tokens" in response.json["error"]["message"]


async def test_a_prompt_larger_than_a_keys_minute_is_the_clients_error():
    async with router(gate=gate("one tokens-per-minute=2")) as r, connected(r) as client:
        client.post(headers=bearer("one"))
        response = await client.answer()
        assert response.status == 400
        assert response.json["error"]["code"] == "request_too_large"
        assert r.prefill.calls == []


async def test_what_other_routers_let_in_counts():
    others = Others()
    async with router(gate=gate("one name=a requests-per-minute=5", others=others)) as r, connected(r) as client:
        r.prefill_when_asked()
        r.decode.script = stream("x")
        others.taken["a"] = Spent(0, 5, 0)
        client.post(stream=True, headers=bearer("one"))
        assert (await client.answer()).status == 429
        others.taken.clear()
        client.post(stream=True, headers=bearer("one"))
        assert (await client.answer()).status == 200


def test_what_nobody_uses_any_more_is_forgotten():
    clock = 0.0
    keys = parse_keys("one name=a requests-per-minute=5")
    limiter = Limiter(shared=Alone(), on_refusal=print, clock=lambda: clock)
    ticket = limiter.enter(keys[0])
    ticket.leave(3)
    ticket.leave(3)
    assert limiter.spent() == {"a": Spent(0, 1, 3)}
    clock = 63.0

    assert limiter.spent() == {}
    assert limiter._uses == {}
