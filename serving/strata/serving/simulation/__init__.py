"""Discrete-event simulation of an endpoint: engines without weights behind the routing and admission code of production."""
