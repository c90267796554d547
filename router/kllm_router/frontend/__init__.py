"""Where clients come in: OpenAI over HTTP, and gRPC."""
