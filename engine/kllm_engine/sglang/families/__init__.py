"""Model families that SGLang finds without importing all of its model files."""
