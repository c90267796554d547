"""The KV pool of one engine: what requests hold, and what the prefix cache keeps beside it. Pure."""

from __future__ import annotations

from kllm_core.engine_model.cache import PrefixCache
from kllm_core.engine_model.job import Job
from kllm_core.engine_model.spec import EngineSpec


class KvPool:
    """Counts tokens. What nothing uses gives way to what is needed.

    Attributes:
        cache: blocks that requests share.
    """

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        self.cache = PrefixCache(host_blocks=spec.host_tokens // spec.block_tokens)
        self._private = 0.0

    @property
    def used(self) -> float:
        """Tokens that requests hold, shared blocks counted once."""
        return self._private + self.cache.used * self._spec.block_tokens

    @property
    def evictable(self) -> int:
        """Tokens that only the cache keeps."""
        return self.cache.evictable * self._spec.block_tokens

    @property
    def room(self) -> float:
        """Tokens that could be taken, with all that is evictable given up."""
        return self._spec.kv_tokens - self.used

    @property
    def free(self) -> float:
        """Tokens that nothing holds, not even the cache."""
        return self.room - self.evictable

    def take(self, tokens: float) -> None:
        """Tokens of one request's own; there must be room."""
        self._private += tokens
        self._fit()

    def give_back(self, tokens: float) -> None:
        """Tokens of one request's own that it needs no more."""
        self._private -= tokens

    def begin(self, job: Job, *, reserve: int) -> int | None:
        """Take what a prompt needs, cached blocks included.

        Args:
            job: gets its cached tokens and its share of the pool.
            reserve: tokens of room that must be left.

        Returns:
            Blocks that must be loaded from the second tier; None when there is no room, and nothing was taken.
        """
        size = self._spec.block_tokens
        match = self.cache.match(job.blocks)
        pinned = job.blocks[: match.blocks]
        self.cache.pin(pinned)
        private = max(0, job.prompt_tokens - match.blocks * size)
        if self.used + private + reserve > self._spec.kv_tokens:
            self.cache.unpin(pinned)
            return None
        job.pinned, job.private_tokens = match.blocks, private
        # The last token is always computed: its logits make the first output token.
        job.cached_tokens = job.computed = min(match.blocks * size, job.prompt_tokens - 1)
        self.take(private)
        return match.host

    def complete(self, job: Job) -> None:
        """A prompt is computed: others may use its full blocks, too."""
        rest = job.blocks[job.pinned :]
        if rest:
            self.cache.pin(rest)
            tokens = len(rest) * self._spec.block_tokens
            job.pinned = len(job.blocks)
            job.private_tokens -= tokens
            self._private -= tokens
            self._fit()

    def drop(self, job: Job) -> None:
        """A request holds nothing any more; its blocks stay in the cache."""
        self.cache.unpin(job.blocks[: job.pinned])
        self._private -= job.private_tokens
        job.pinned = job.private_tokens = 0

    def _fit(self) -> None:
        over = self.used + self.evictable - self._spec.kv_tokens
        if over > 0:
            self.cache.evict(-(-int(over) // self._spec.block_tokens))
