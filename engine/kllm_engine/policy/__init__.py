"""What an engine computes next. Pure: SGLang's plugin and the simulator use the same."""
