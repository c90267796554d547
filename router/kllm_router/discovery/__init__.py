"""Which instances there are and where their agents listen."""
