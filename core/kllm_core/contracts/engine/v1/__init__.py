"""Version 1."""
