"""SGLang as kLLM's engine: its arguments, and the plugin that runs inside its scheduler."""
