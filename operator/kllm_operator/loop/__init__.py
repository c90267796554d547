"""The control loop of one service: snapshot, plan, one safe step at a time, and why."""
