"""`kllm-engine` whose agent breaks at what its plugin tells of requests."""

from __future__ import annotations

from kllm_engine.agent.reports import PluginReports
from kllm_engine.main import main
from kllm_engine.messages import Message, Request

if __name__ == "__main__":
    handle = PluginReports.handle

    def break_down(reports: PluginReports, message: Message) -> None:
        if isinstance(message, Request):
            raise KeyError("no such book")
        handle(reports, message)

    PluginReports.handle = break_down  # type: ignore[method-assign]
    main()
