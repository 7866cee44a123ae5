"""`strata bench monitoring`: a real Prometheus with the series of a simulated fleet, the recording rules and every board query.

- `fleet.py` has the nodes, teams, runs and engines, and the series that each of them exports.
- `history.py` writes the hours before the start into the database. `targets.py` serves the series that are scraped from then on.
- `measure.py` runs Prometheus and the queries. `report.py` prints and writes the result.
"""
