"""KV-aware routing: names of prefixes, the replicas that have them cached, and the choice by expected time to first token."""
