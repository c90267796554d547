"""What several routers of one service share: how much each has in flight, exchanged through Redis."""
