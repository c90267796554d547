"""What a control loop saw, written down, and what its planner would have done with it."""
