from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio
from engine_agent.harness import until

from kllm_core.blocks import block_hashes
from kllm_engine.agent.cache.book import CacheBook
from kllm_engine.agent.cache.changes import Tier
from kllm_engine.agent.cache.follower import CacheFollower

PAGE = 2


class Publisher:
    """SGLang's publisher: PUB of [topic, sequence, payload] and a ROUTER that repeats the last batches."""

    def __init__(self, run_dir: Path, *, kept: int = 1000) -> None:
        self.endpoint = f"ipc://{run_dir}/kv.sock"
        self.replay_endpoint = f"ipc://{run_dir}/replay.sock"
        self.kept = kept
        self.sequence = 0
        self.replays = 0
        self.batches: list[tuple[int, bytes]] = []
        self._context = zmq.asyncio.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._pub.bind(self.endpoint)
        self._router = self._context.socket(zmq.ROUTER)
        self._router.bind(self.replay_endpoint)

    async def publish(self, *events: dict[str, Any], lost: bool = False) -> None:
        payload = msgspec.msgpack.encode([0.0, list(events), 0])
        self.batches = [*self.batches, (self.sequence, payload)][-self.kept :]
        if not lost:
            await self._pub.send_multipart([b"", self.sequence.to_bytes(8, "big"), payload])
        self.sequence += 1

    async def serve_replays(self) -> None:
        while True:
            client, _, start = await self._router.recv_multipart()
            self.replays += 1
            for sequence, payload in self.batches:
                if sequence >= int.from_bytes(start, "big"):
                    await self._router.send_multipart([client, b"", sequence.to_bytes(8, "big"), payload])
            await self._router.send_multipart([client, b"", (-1).to_bytes(8, "big", signed=True), b""])

    def close(self) -> None:
        self._pub.close(0)
        self._router.close(0)
        self._context.term()


@asynccontextmanager
async def following(publisher: Publisher, **options: Any) -> AsyncIterator[CacheBook]:
    """A book that follows the publisher."""
    book = CacheBook(PAGE)
    follower = CacheFollower(book, endpoint=publisher.endpoint, replay_endpoint=publisher.replay_endpoint, **options)
    tasks = [asyncio.create_task(publisher.serve_replays()), asyncio.create_task(follower.run())]
    try:
        await until(lambda: publisher.replays, "the follower has asked for what it missed")
        yield book
    finally:
        for task in tasks:
            task.cancel()
        for task in tasks:
            with suppress(asyncio.CancelledError):
                await task
        publisher.close()


def stored(engine_hash: int, tokens: list[int], parent: int | None = None) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": list(range(engine_hash, engine_hash + len(tokens) // PAGE)),
        "parent_block_hash": parent,
        "token_ids": tokens,
        "block_size": PAGE,
        "lora_id": None,
        "medium": "GPU",
    }


async def _holds(book: CacheBook, tokens: list[int]) -> None:
    expected = set(block_hashes(tokens, PAGE))
    await until(lambda: expected <= set(book._mirror.blocks(Tier.DEVICE)), f"blocks of {tokens} are known")


async def test_events_from_before_the_subscription_are_fetched(run_dir: Path) -> None:
    publisher = Publisher(run_dir)
    await publisher.publish(stored(1, [1, 2, 3, 4]))
    async with following(publisher) as book:
        await _holds(book, [1, 2, 3, 4])


async def test_lost_events_are_fetched_when_the_next_one_shows_the_gap(run_dir: Path) -> None:
    publisher = Publisher(run_dir)
    async with following(publisher) as book:
        await publisher.publish(stored(1, [1, 2]))
        await _holds(book, [1, 2])
        await publisher.publish(stored(2, [3, 4], parent=1), lost=True)
        await publisher.publish(stored(3, [5, 6], parent=2))
        await _holds(book, [1, 2, 3, 4, 5, 6])
        assert book.skipped_events == 0


async def test_lost_events_with_nothing_after_them_are_fetched_in_time(run_dir: Path) -> None:
    publisher = Publisher(run_dir)
    async with following(publisher, probe_seconds=0.1) as book:
        await publisher.publish(stored(1, [1, 2]), lost=True)
        await _holds(book, [1, 2])


async def test_a_gap_that_the_engine_cannot_fill_starts_the_mirror_again(run_dir: Path) -> None:
    publisher = Publisher(run_dir, kept=2)
    async with following(publisher) as book:
        await publisher.publish(stored(1, [1, 2]))
        await _holds(book, [1, 2])
        before = book.sequence
        for token in range(10, 15):
            await publisher.publish(stored(token, [token, token]), lost=True)
        await publisher.publish(stored(20, [20, 20]))
        await _holds(book, [20, 20])
        held = set(book._mirror.blocks(Tier.DEVICE))
        assert set(block_hashes([1, 2], PAGE)).isdisjoint(held)
        assert set(block_hashes([14, 14], PAGE)) <= held
        assert book.sequence > before


async def test_blocks_of_an_unknown_prefix_are_left_out_and_the_rest_goes_on(run_dir: Path) -> None:
    publisher = Publisher(run_dir)
    async with following(publisher) as book:
        await publisher.publish(stored(1, [1, 2]), stored(2, [3, 4], parent=404))
        await publisher.publish(stored(3, [7, 8]))
        await _holds(book, [7, 8])
        await _holds(book, [1, 2])
        assert book.skipped_events > 0


async def test_a_payload_that_cannot_be_read_is_skipped(run_dir: Path) -> None:
    publisher = Publisher(run_dir)
    async with following(publisher) as book:
        await publisher.publish({"type": "BlockPainted"})
        await publisher.publish(stored(3, [7, 8]))
        await _holds(book, [7, 8])
