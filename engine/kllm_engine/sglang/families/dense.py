"""Dense decoder models; every other architecture is imported by SGLang when a model names it."""

from __future__ import annotations

from sglang.srt.models.llama import LlamaForCausalLM
from sglang.srt.models.qwen2 import Qwen2ForCausalLM
from sglang.srt.models.qwen3 import Qwen3ForCausalLM

EntryClass = [LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM]
"""The name by which SGLang finds a module's models."""
