"""The planner against published figures."""
