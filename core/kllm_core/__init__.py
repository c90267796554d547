"""What operator, router and engine share: objectives, load, timing, block hashes, kinds and protobuf contracts."""
