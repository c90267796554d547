"""Asks routers for greedy answers, token ids in and out."""

from __future__ import annotations

import random

import grpc

from kllm_core.contracts.router.v1 import router_pb2, router_pb2_grpc


def prompt(length: int, seed: int) -> list[int]:
    """Token ids without special ones; the tiny model has 512."""
    return [random.Random(seed * 100_003 + n).randrange(10, 500) for n in range(length)]


async def generate(target: str, ids: list[int], tokens: int) -> tuple[list[int], router_pb2.Finished]:
    """Token ids of a greedy answer of so many tokens from a router's gRPC address, and its last message."""
    request = router_pb2.GenerateRequest(
        tokens=router_pb2.TokenIds(ids=ids),
        sampling=router_pb2.Sampling(max_tokens=tokens, temperature=0, ignore_eos=True),
    )
    output: list[int] = []
    async with grpc.aio.insecure_channel(target) as channel:
        async for answer in router_pb2_grpc.RouterStub(channel).Generate(request, timeout=120):
            output.extend(answer.chunk.token_ids)
            if answer.WhichOneof("event") == "finished":
                return output, answer.finished
    raise AssertionError("the stream ended without its last message")
