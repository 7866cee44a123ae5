"""Speculative decoding: draft models, vLLM's settings, and the policy that stops drafting where it costs more than it saves."""
