"""Talks to engines: pairs a prefill and a decode instance, and relays what they answer."""
