"""The timing model of a running engine: what is measured, and the model that fits it best."""
