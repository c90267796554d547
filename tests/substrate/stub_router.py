"""The service levels of a router without clients."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc

from kllm_core.contracts.router.v1 import router_pb2, router_pb2_grpc


class QuietLevels(router_pb2_grpc.ServiceLevelsServicer):
    """Nothing arrives."""

    def WatchServiceLevels(  # noqa: N802
        self, request: router_pb2.WatchServiceLevelsRequest, context: grpc.ServicerContext
    ) -> Iterator[router_pb2.ServiceLevelReport]:
        """An empty report each interval."""
        seconds = request.interval_milliseconds / 1000
        while context.is_active():
            yield router_pb2.ServiceLevelReport(router_id="stub", interval_seconds=seconds)
            time.sleep(seconds)


def serve_levels() -> str:
    """Serve on a free port until the process ends; its address."""
    server = grpc.server(ThreadPoolExecutor(max_workers=2))
    router_pb2_grpc.add_ServiceLevelsServicer_to_server(QuietLevels(), server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    _kept.append(server)  # a server that nobody holds is stopped
    return address


_kept: list[grpc.Server] = []
