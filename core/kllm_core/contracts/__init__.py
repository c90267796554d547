"""Protobuf contracts and their generated code (`make generate`)."""
