"""Pipeline schedules, their simulation, and timelines."""
