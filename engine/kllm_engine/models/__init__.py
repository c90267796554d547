"""Making a model available as a local folder; nothing here imports torch."""
