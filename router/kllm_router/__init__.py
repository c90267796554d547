"""The router: pairs a prefill and a decode instance for every request and streams the answer."""
