"""What a control loop saw, read back, and what its planner would have done with it."""
