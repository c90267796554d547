"""The operator: plans pool sizes and keeps instances where they are wanted."""
