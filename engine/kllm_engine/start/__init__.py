"""Starting engines fast: SGLang is imported once, and servers are forked from that process."""
