"""Models on the way to a folder: from a hub, under a link, and what can go wrong."""
