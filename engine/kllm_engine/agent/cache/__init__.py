"""What the engine's KV cache holds, told in the fleet's block hashes."""
